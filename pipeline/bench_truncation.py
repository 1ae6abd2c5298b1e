"""What a teacher that is known by its k largest logits costs in training: its bias, by loss and k.

    python -m pipeline.bench_truncation TARGET DRAFTER --prompts mt_bench.jsonl.gz

The target answers benchmark prompts, greedily and at a temperature. At every token of its answers
the loss and its gradient by the drafter's logits are computed twice: from all of the target's
logits, and from its k largest with the log-sum-exp of all, as stage=regenerate keeps them.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from decode import Sampling
from decode.resolve import resolve_drafter, resolve_target
from drafters.losses import DIVERGENCES
from drafters.network_drafter import NetworkDrafter
from drafters.truncation import TruncationBias, truncation_bias
from drafters.vocabulary import columns_of
from pipeline.bench_command import command, conditions, new_table, show, told
from pipeline.bench_pair import read_bench
from pipeline.generation import Generator, Job
from pipeline.progress import progress

BATCH = 16  # prompts that are answered at once


def biases(
    target: Any,  # what SpeculativeDecoder takes: a folder or a name
    drafter: Any,
    prompts: Path,
    *,
    num_prompts: int,
    max_new_tokens: int,
    temperature: float,
    top: Sequence[int],
    dtype: str | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Means over all answer tokens: a row a law, loss and k, and under which conditions."""
    target = resolve_target(
        target, tokenizer=None, device=device, dtype=dtype, backend="transformers"
    )
    drafter = resolve_drafter(drafter, target)
    if not isinstance(drafter, NetworkDrafter):
        raise ValueError(f"{type(drafter).__name__} has no logits; give a drafter with a network")
    if not 0 < min(top) <= max(top) <= target.vocab_size:
        raise ValueError(f"--top names {list(top)}; give values from 1 to {target.vocab_size}")
    asked = read_bench(prompts, num_prompts, max_new_tokens, target.tokenizer)
    rows = []
    for law in (Sampling(seed=0), Sampling(temperature=temperature, seed=0)):
        jobs = [Job(one.id, list(one.token_ids), law, max_new_tokens) for one in asked]
        generator = Generator(target.model, target.eos_token_ids, 0, BATCH)
        found: list[tuple[int, dict[int, dict[str, TruncationBias]]]] = []
        with progress("truncation", len(jobs), "answers") as meter:
            for _, place, trace in generator.stream([jobs]):
                ids = torch.cat([torch.tensor(jobs[place].prompt_ids), trace.token_ids])
                found.append((len(trace.token_ids), _of_answer(target, drafter, ids, trace, top)))
                meter.advance()
        rows += _means(found, law.temperature, top)
    return {
        **conditions(target),
        "prompts": {prompts.name: len(asked)},
        "max_new_tokens": max_new_tokens,
        "rows": rows,
    }


@torch.no_grad()
def _of_answer(
    target: Any, drafter: NetworkDrafter, ids: Tensor, trace: Any, top: Sequence[int]
) -> dict[int, dict[str, TruncationBias]]:
    """k -> loss -> bias, over the tokens of one answer."""
    read = ids[None, :-1].to(drafter.device)
    keep = torch.arange(read.shape[1], device=read.device)[None] >= len(ids) - 1 - len(trace.lse)
    teacher = target.model(input_ids=read).logits[keep].float()
    logits = drafter.trainable(read, keep=keep).float()
    columns = columns_of(drafter.draft_ids, drafter.vocab_size, read.device)
    return {k: truncation_bias(logits, teacher, k, columns) for k in top}


def _means(
    found: Sequence[tuple[int, dict[int, dict[str, TruncationBias]]]],
    temperature: float,
    top: Sequence[int],
) -> list[dict[str, Any]]:
    """Over answers, each by its tokens."""
    total = sum(count for count, _ in found)
    return [
        {
            "temperature": temperature,
            "loss": name,
            "k": k,
            "num_tokens": total,
            **{
                field: sum(n * asdict(bias[k][name])[field] for n, bias in found) / total
                for field in TruncationBias.__dataclass_fields__
            },
        }
        for name in DIVERGENCES
        for k in top
    ]


def table(results: dict[str, Any]) -> Table:
    """How far the loss is off, and in which direction and length its gradient points."""
    names = ("loss", "text at T", "k", "loss, all logits", "error", "cosine", "length")
    made = new_table("a teacher known by its k largest logits, against all of them", *names)
    for row in results["rows"]:
        made.add_row(
            row["loss"],
            f"{row['temperature']:g}",
            str(row["k"]),
            f"{row['mean_loss']:.4f}",
            f"{row['mean_error']:.4f}",
            f"{row['gradient_cosine']:.4f}",
            f"{row['gradient_ratio']:.3f}",
        )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    of_drafter = "a trained drafter's folder, or a causal LM"
    parser = command(__doc__, "folder or name of a causal LM", of_drafter)
    parser.add_argument("--prompts", type=Path, required=True, help="a benchmark's JSON lines")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top", type=int, nargs="+", default=[8, 32, 128])
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    show(table(told(biases(given.pop("target"), given.pop("drafter"), **given), out)))


if __name__ == "__main__":
    main()
