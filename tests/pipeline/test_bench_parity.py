"""Would catch: a comparison that compares nothing, or the wrong places; a forward that is a little
off, in the prompt alone or in a few tokens at a time; another's largest logit, or NaN, passed over;
a failure that the exit status does not tell.

On a CPU the kernels run in Triton's interpreter, where their float32 is no coarser than a GPU's.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from decode.native import static_cache
from decode.native.target import NativeTarget
from pipeline import bench_parity
from pipeline.bench_parity import compare, full_precision, main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(static_cache, "FIRST_CAPACITY", 128)
    words = iter(range(10**9))
    monkeypatch.setattr(
        bench_parity,
        "_text",
        lambda tokenizer, domain, count: [5 + 7 * next(words) % 90 for _ in range(count)],
    )
    tiny_model(num_layers=2).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_both_forwards_are_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "parity.json"
    main([str(folder), str(folder), "--device", "cpu", "--num-tokens", "31", "--out", str(out)])
    told = json.loads(out.read_text())
    assert told["holds"]
    for found in told["targets"]:
        counts = {way: row["num_tokens"] for way, row in found["ways"].items()}
        assert counts == {"prompt": 93, **{f"{w} a pass": 48 for w in range(1, 6)}}
        assert 0 < max(row["largest_error"] for row in found["ways"].values()) < 1e-5
    assert "1 a pass" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_the_kernels_are_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_parity, "TEXTS", ("code",))
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "exactness": "law"}
    found = compare(str(folder), **settings, num_tokens=9, widths=(3,), kernels=True)
    assert found["in_kernels"]
    assert found["holds"], found
    assert {way: row["num_tokens"] for way, row in found["ways"].items()} == {
        "prompt": 9,
        "3 a pass": 5,
    }


@pytest.mark.parametrize("places", ["prompt", "pass"])
def test_a_forward_that_is_off_fails(
    folder: Path, places: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = NativeTarget.score

    def off(target: NativeTarget, rows: Any, ids: Any) -> torch.Tensor:
        logits = whole(target, rows, ids)
        planted = (len(ids[0]) > 5) == (places == "prompt")
        return logits + 1e-3 * logits.roll(1, -1) if planted else logits

    monkeypatch.setattr(NativeTarget, "score", off)
    with pytest.raises(SystemExit) as raised:
        main([str(folder), "--device", "cpu", "--num-tokens", "20"])
    assert raised.value.code == 1


@pytest.mark.parametrize("value", [torch.nan, 1e-6])
def test_another_largest_logit_and_nan_fail(
    folder: Path, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_parity, "TEXTS", ("code",))
    whole = NativeTarget.score

    def tipped(target: NativeTarget, rows: Any, ids: Any) -> torch.Tensor:
        logits = whole(target, rows, ids).clone()
        best, second = logits[0, -1].topk(2).indices.tolist()
        logits[0, -1, second] = logits[0, -1, best] * (1 + value)
        return logits

    monkeypatch.setattr(NativeTarget, "score", tipped)
    monkeypatch.setattr(bench_parity, "BOUND", 1e9)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "exactness": "law"}
    found = compare(str(folder), **settings, num_tokens=8, widths=(4,))
    assert not found["holds"]
    assert all(
        math.isnan(row["largest_error"]) == math.isnan(value) for row in found["ways"].values()
    )


def test_tf32_is_off_inside_only() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("exactness", ["law", "bitwise"])
def test_compiled_kernels_are_transformers(folder: Path, exactness: str) -> None:
    found = compare(str(folder), dtype="float32", device="cuda", exactness=exactness, num_tokens=90)
    assert found["in_kernels"]
    assert found["holds"], found
