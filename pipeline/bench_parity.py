"""Our forward held against transformers' on the same weights and real text, logit by logit.

    python -m pipeline.bench_parity TARGET [TARGET ...] --device cuda --out parity.json

Both compute in float32 unless told otherwise, without TF32. Texts are the embedded prompts as they
are written. Each is read as a prompt is, whole, and again half as a prompt and half in passes of 1
to 5 tokens. An error is that of a token's row of logits: |ours - theirs| / |theirs|, Euclidean.
Exits with 1 where one is above 1e-4 or a token's largest logit is another's.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from decode.native.target import NativeTarget
from decode.targets.loading import load_causal_lm, load_tokenizer
from decode.targets.moving import moved
from pipeline.bench_command import command, conditions, new_table, show, told
from pipeline.progress import progress

BOUND = 1e-4
WIDTHS = (1, 2, 3, 4, 5)  # tokens of a pass
TEXTS = ("code", "chat", "reasoning")


def compare(
    name: str,
    *,
    dtype: str,
    device: str | None,
    exactness: str,
    num_tokens: int,
    widths: Sequence[int] = WIDTHS,
    kernels: bool | None = None,  # None: in kernels where there is CUDA
) -> dict[str, Any]:
    """A row for each way to read, the worst of all texts, with conditions."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(name)
    model = moved(load_causal_lm(name, getattr(torch, dtype)), device).eval()
    target = NativeTarget(model, tokenizer, name, exactness=exactness, kernels=kernels)
    rows: dict[str, dict[str, Any]] = {}
    texts = [_text(tokenizer, domain, num_tokens) for domain in TEXTS]
    with full_precision(), progress("parity: texts", len(texts), "texts") as meter:
        for text in texts:
            wanted = _theirs(model, text)
            for way, first, found in _ours(target, text, widths):
                _add(rows.setdefault(way, _nothing()), found, wanted[first:])
            meter.advance()
    return {
        **conditions(target),
        "target": Path(name).name,
        "exactness": exactness,
        "in_kernels": target.kernel_forward is not None,
        "num_texts": len(texts),
        "text_tokens": [len(text) for text in texts],
        "bound": BOUND,
        "ways": rows,
        "holds": all(holds(row) for row in rows.values()),
    }


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 are not rounded to TF32 inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def holds(row: Mapping[str, Any]) -> bool:
    """Whether a way to read gives what transformers gives."""
    return row["largest_error"] <= BOUND and row["argmax_differs"] == 0


def _text(tokenizer: Any, domain: str, num_tokens: int) -> list[int]:
    written = (files("pipeline.prompts") / f"{domain}.yaml").read_text(encoding="utf-8")
    found: list[int] = tokenizer(written, add_special_tokens=False)["input_ids"]
    return found[:num_tokens]


@torch.inference_mode()
def _theirs(model: Any, text: Sequence[int]) -> Tensor:  # [T, V]
    ids = torch.tensor([list(text)], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def _ours(
    target: NativeTarget, text: Sequence[int], widths: Sequence[int]
) -> Iterator[tuple[str, int, Tensor]]:
    """Each way to read, the first place that it tells, and logits from there on."""
    yield "prompt", 0, target.score([target.open()], [text])[0]
    half = len(text) // 2
    for width in widths:
        row = target.open()
        target.prefill(row, text[:half])
        passes = range(half, len(text), width)
        parts = [target.score([row], [text[place : place + width]])[0] for place in passes]
        yield f"{width} a pass", half, torch.cat(parts)


def _nothing() -> dict[str, Any]:
    return {"num_tokens": 0, "largest_error": 0.0, "argmax_differs": 0, "largest_gap": 0.0}


def _add(row: dict[str, Any], found: Tensor, wanted: Tensor) -> None:
    """Take in the logits [T, V] of one text."""
    ours, theirs = found.double(), wanted.double()
    errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    worst = float(errors.max())  # NaN stays, and is no error below any bound
    row["num_tokens"] += len(ours)
    row["largest_error"] = worst if worst != worst else max(row["largest_error"], worst)
    differs = ours.argmax(-1) != theirs.argmax(-1)
    row["argmax_differs"] += int(differs.sum())
    if bool(differs.any()):  # how far apart their two were where ours are the other way round
        best = theirs[differs].max(-1).values
        chosen = theirs[differs].gather(-1, ours[differs].argmax(-1, keepdim=True))[:, 0]
        row["largest_gap"] = max(row["largest_gap"], float((best - chosen).max()))


def parity_table(results: Mapping[str, Any]) -> Table:
    """The worst of every way to read."""
    title = ", ".join(str(results[key]) for key in ("target", "dtype", "exactness"))
    table = new_table(f"against transformers: {title}", "read", "tokens", "error", "other argmax")
    for way, row in results["ways"].items():
        numbers = str(row["num_tokens"]), f"{row['largest_error']:.1e}", str(row["argmax_differs"])
        table.add_row(way, *numbers)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__, "folder or name of a causal LM of the Llama family", dtype="float32")
    parser.add_argument("more", nargs="*", help="further ones")
    parser.add_argument("--exactness", default="bitwise", help="bitwise or law")
    parser.add_argument("--num-tokens", type=int, default=400, help="of each text")
    given = vars(parser.parse_args(arguments))
    out, names = given.pop("out"), [given.pop("target"), *given.pop("more")]
    found = [compare(name, **given) for name in names]
    told({"targets": found, "holds": all(one["holds"] for one in found)}, out)
    show(*(parity_table(one) for one in found))
    if not all(one["holds"] for one in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
