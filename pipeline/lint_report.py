"""What a linter has counted: numbers for the manifest, a few lines and warnings for people."""

import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from pipeline.files import write_json

log = logging.getLogger(__name__)

FILE = "lint.json"
REMARKS = {  # metric -> (share from which on it is a warning, what is said then)
    "lint_loop_share": (
        0.1,
        "{:.0%} of the answers end in a loop, which flatters lookup and teaches drafters to "
        "repeat; raise stages.regenerate.temperature, or leave them out with drop_loops=true",
    ),
    "lint_cut_share": (
        0.9,
        "{:.0%} of the answers are cut off at their longest, so drafters see few texts end; raise "
        "stages.regenerate.max_new_tokens",
    ),
    "lint_duplicate_share": (
        0.1,
        "{:.0%} of the answers are word for word those of another prompt; look at the prompts",
    ),
    "lint_empty_share": (
        0.02,
        "{:.1%} of the answers are empty; look at the prompts and at the chat template",
    ),
    "lint_too_long_share": (
        0.05,
        "{:.0%} of the prompts leave no room for an answer within max_tokens and teach nothing; "
        "raise max_tokens",
    ),
    "lint_outside_share": (
        0.05,
        "{:.1%} of the answer tokens are outside the draft vocabulary, and each of them is a "
        "rejection; raise num_draft_vocab",
    ),
    "lint_padding_share": (
        1e-9,
        "{:.2%} of the answer tokens are padding columns of the target's logits, which stand for "
        "no token; check that weights and tokenizer belong together",
    ),
    "lint_foreign_share": (
        0.0,
        "the text is not the target's own: at {:.0%} of its tokens (of {num_asked} responses) the "
        "target's likeliest token is another, and a drafter that has learned the text is rejected "
        "there at temperature 0; use text=answers, or the answers of stage=regenerate",
    ),
}


@dataclass(frozen=True, slots=True)
class LintReport:
    """What was found."""

    metrics: dict[str, float]  # plain numbers
    warnings: list[str]
    lines: list[str]

    def tell(self) -> None:
        """Log the lines, and each warning once in a process."""
        for line in self.lines:
            log.info("%s", line)
        for warning in self.warnings:
            _warn_once(warning)

    def save(self, out: Path) -> None:
        """Write it beside what is made of these rows."""
        write_json(out / FILE, asdict(self))


def read_lint(out: Path) -> dict[str, float]:
    """The metrics of a saved report; empty where there is none."""
    path = out / FILE
    found: dict[str, float] = {}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return found


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


@dataclass
class Counts:
    """Of the rows that a linter has seen."""

    rows: Counter[str] = field(default_factory=Counter)  # name of what was found -> rows
    prompt_tokens: list[int] = field(default_factory=list)
    answer_tokens: list[int] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)  # domain -> answer tokens
    outside: Counter[str] = field(default_factory=Counter)  # of which outside the draft vocabulary
    padding: int = 0  # of which are padding columns
    num_dropped: int = 0

    def metrics(self) -> dict[str, float]:
        """Shares, and the spread of lengths; empty where no row was seen."""
        num_rows, num_tokens = len(self.answer_tokens), sum(self.tokens.values())
        if not num_rows:
            return {"lint_rows": 0}
        answers, prompts = np.array(self.answer_tokens), np.array(self.prompt_tokens)
        learned = answers / (answers + prompts)
        found = {
            f"lint_{name}_share": self.rows[name] / num_rows
            for name in ("loop", "cut", "empty", "duplicate", "too_long")
        }
        return {
            "lint_rows": num_rows,
            "lint_tokens": num_tokens,
            **_spread("lint_learned_share", learned),
            **_spread("lint_prompt_tokens", prompts),
            **_spread("lint_answer_tokens", answers),
            **found,
            "lint_loops_dropped": self.num_dropped,
            "lint_padding_share": self.padding / num_tokens,
        }

    def outside_shares(self) -> dict[str, float]:
        """How much is outside the draft vocabulary, and in which domain."""
        by_domain = {
            f"lint_outside_share_{domain}": self.outside[domain] / count
            for domain, count in self.tokens.items()
            if domain and len(self.tokens) > 1
        }
        total = sum(self.outside.values()) / max(1, sum(self.tokens.values()))
        return {"lint_outside_share": total, **by_domain}


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    low, median, high = np.percentile(values, [5, 50, 95]).tolist()
    return {f"{name}_p5": low, f"{name}_median": median, f"{name}_p95": high}


def remarks(metrics: dict[str, float], num_asked: int) -> list[str]:
    """The sentence of every metric that is beyond what is usual."""
    return [
        text.format(metrics[name], num_asked=num_asked)
        for name, (limit, text) in REMARKS.items()
        if metrics.get(name, -1.0) >= limit
    ]


def lines(metrics: dict[str, float]) -> list[str]:
    """What a person reads although nothing is wrong."""
    if not metrics["lint_rows"]:
        return ["lint: no rows"]
    m = metrics
    outside = m.get("lint_outside_share")
    return [
        f"lint: {m['lint_rows']:,} rows, {m['lint_tokens']:,} answer tokens; learned share of a "
        f"row: median {m['lint_learned_share_median']:.0%} (5%: {m['lint_learned_share_p5']:.0%}, "
        f"95%: {m['lint_learned_share_p95']:.0%})",
        f"lint: prompts of {m['lint_prompt_tokens_median']:.0f} tokens (95%: "
        f"{m['lint_prompt_tokens_p95']:.0f}), answers of {m['lint_answer_tokens_median']:.0f} "
        f"(95%: {m['lint_answer_tokens_p95']:.0f}); cut off {m['lint_cut_share']:.0%}, looping "
        f"{m['lint_loop_share']:.1%} ({m['lint_loops_dropped']:,} left out), empty "
        f"{m['lint_empty_share']:.1%}, said twice {m['lint_duplicate_share']:.1%}",
        f"lint: {m['lint_columns']:,} logit columns, {m['lint_real_ids']:,} of them tokens; "
        f"{m['lint_prompts_rendered']:,} prompts rendered again"
        + (
            "" if outside is None else f"; answer tokens outside the draft vocabulary {outside:.1%}"
        ),
    ]
