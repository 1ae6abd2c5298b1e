"""Would catch: a part of the measurement that does not run, or that says nothing was compared; bits
found equal though a product depends on the number of rows; a tile that does not fit or leaves
columns out among the candidates; a printed choice that kernels/tiles.py would not read back.

Times are a GPU's affair: on a CPU everything runs in Triton's interpreter and none is told.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from decode.native import kernel_forward, static_cache
from kernels.tiles import Tile, pipeline_bytes
from pipeline import bench_plain, bench_sweep
from pipeline.bench_engine import main
from pipeline.bench_passes import Engine, bit_equality
from pipeline.bench_sweep import Site, candidates, pinned_lines

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(static_cache, "FIRST_CAPACITY", 128)
    monkeypatch.setattr(bench_plain, "QUESTIONS", ("w1 w2",))
    tiny_model(num_layers=1).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_everything_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "engine.json"
    words = [str(folder), "--dtype", "float32", "--exactness", "law", "--out", str(out)]
    few = ["--context-tokens", "3", "--rounds", "1", "--num-prompts", "1", "--max-new-tokens", "3"]
    main([*words, *few, "--widths", "1", "2", "--batches", "1", "2"])
    results = json.loads(out.read_text())
    assert [(row["batch"], row["width"]) for row in results["passes"]] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    assert results["bits"]["compared"] == 1 + 2 + 2 * 1 + 2 * 2
    assert results["bits"]["differ"] == 0
    assert len(results["texts"]) == 3
    assert all(row["equal_texts"] == 1 for row in results["texts"].values())
    printed = capsys.readouterr().out
    assert "bits: 0 of 9 tokens differ" in printed
    assert "over compiled" in printed


def test_a_product_that_depends_on_the_rows_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = kernel_forward.product_parts

    def planted(x: torch.Tensor, weight: torch.Tensor, **rest: Any) -> torch.Tensor:
        if len(x) < 2:
            return whole(x, weight, **rest)
        left = x.clone()
        left[:, x.shape[1] // 2 :] = 0
        return whole(left, weight, **rest) + whole(x - left, weight, **rest)

    monkeypatch.setattr(kernel_forward, "product_parts", planted)
    engine = Engine(str(folder), "float32", "cpu", "law")
    found = bit_equality(engine, [1], [1, 2], 2)
    assert found["differ"] > 0
    assert found["where"] == ["1 rows of 2"]


def test_the_sweep_says_what_to_pin(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_sweep, "CONTEXTS", (9,))
    main([str(folder), "--dtype", "float32", "--sweep"])
    printed = capsys.readouterr().out
    assert '("parts", 64, 32): Tile(32, 32, 1, 4, 4),' in printed
    assert '("gated", 48, 32): ' in printed
    assert "Attention(128, 64, 4, 3) pinned" in printed


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("parts", (1536, 8960)),
        ("parts", (2048, 1536)),
        ("gated", (8960, 1536)),
        ("whole", (151_936, 1536)),
    ],
)
def test_candidates_cover_every_column_once_and_fit(kind: str, shape: tuple[int, int]) -> None:
    weight = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    site = Site("site", kind, [(weight,) * (2 if kind == "gated" else 1)])
    tiles = list(candidates(site, 2))
    assert len(tiles) == len(set(tiles)) > 3
    for tile in tiles:
        assert shape[1] % (tile.block_k * tile.split) == 0
        assert tile.split == 1 or kind == "parts"
        weights = len(site.weights[0]) * tile.block_n * tile.block_k * 2
        assert weights * tile.num_stages <= pipeline_bytes(torch.device("cpu"))


def test_a_pinned_line_is_a_line_of_the_table() -> None:
    found = {
        "qkv": {"kind": "parts", "shape": [64, 32], "tiles": [{"tile": [32, 64, 2, 4, 3]}]},
    }
    (line,) = pinned_lines(found)
    assert eval(f"{{{line}}}", {"Tile": Tile}) == {("parts", 64, 32): Tile(32, 64, 2, 4, 3)}


def test_a_texts_seconds_end_with_its_own_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(forward, prompts, most, eos, note):  # one step more than the text has
        for _ in range(4):
            note()
        return [[5, 6, 7]]

    monkeypatch.setattr(bench_plain, "write_greedily", written)
    ticks = iter([1.0, 2.0, 4.0, 50.0])
    clock = SimpleNamespace(now=lambda: next(ticks))
    engine = SimpleNamespace(forward=None, target=SimpleNamespace(eos_token_ids=frozenset()))
    text = bench_plain.engine_way(engine, clock)([1], 3)
    assert text.seconds == 3.0
