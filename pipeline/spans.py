"""Answers of the target, with what each drafter would have had accepted marked in them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeline.answers import Answer
from pipeline.replay import Case, draws, offered_lengths

NUM_TOKENS = 96  # of an answer that are shown
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no whole character decode to

ACCEPTED = "accepted"  # drafted and kept
REFUSED = "refused"  # the target's own token, in the place of a draft that was not
TARGET = "target"  # the target's own token: nothing was drafted, or all of it was accepted

Decode = Callable[[Sequence[int]], str]  # token ids -> text
Run = tuple[str, int, int]  # kind, first token, past the last


def samples(
    cases: Sequence[Case],
    answers: Iterable[Answer],
    decode: Decode,
    lengths: Mapping[tuple[str, str], int],  # (drafter, law) -> K; the others are left out
    per_domain: int,
    seed: int,
) -> list[dict[str, Any]]:
    """A row for each (prompt, law, drafter): the answer's beginning as spans of [kind, text].

    The first prompts of each domain are taken. Under sampling the drafts are one realisation of
    their recorded chances, the one that replay scores policies on.
    """
    texts = {(answer.id, answer.law): answer for answer in answers}
    rows = []
    for case in first_of_each_domain(cases, per_domain):
        answer = texts.get((case.prompt_id, case.law))
        if answer is None:
            continue
        for drafter in case.accept:
            length = lengths.get((drafter, case.law))
            if length is not None:
                runs = walk(case, drafter, length, seed)
                rows.append(_row(case, drafter, length, runs, answer.answer_ids, decode))
    return rows


def first_of_each_domain(cases: Sequence[Case], number: int) -> list[Case]:
    """The first `number` prompts of each domain, under every law, a prompt's laws side by side."""
    ids: dict[str, list[str]] = {}
    for case in cases:
        known = ids.setdefault(case.domain, [])
        if case.prompt_id not in known and len(known) < number:
            known.append(case.prompt_id)
    order = [prompt for known in ids.values() for prompt in known]
    return sorted(
        (case for case in cases if case.prompt_id in order),
        key=lambda case: order.index(case.prompt_id),
    )


def walk(case: Case, drafter: str, num_draft_tokens: int, seed: int) -> list[Run]:
    """What a fixed arm does along the beginning of an answer, pass by pass."""
    accept = case.accept[drafter][:NUM_TOKENS]
    kept = draws(case, seed, repeat=1)[drafter][:NUM_TOKENS]
    offered = offered_lengths(accept)
    runs: list[Run] = []
    start = 0
    while start < len(accept):
        drafted = min(num_draft_tokens, int(offered[start]))
        accepted = int(kept[start, :drafted].cumprod().sum())
        if accepted:
            runs.append((ACCEPTED, start, start + accepted))
        start += accepted
        runs.append((REFUSED if accepted < drafted else TARGET, start, start + 1))
        start += 1
    return runs


def _row(
    case: Case, drafter: str, length: int, runs: Sequence[Run], token_ids: Tensor, decode: Decode
) -> dict[str, Any]:
    ends = [end for _, _, end in runs]
    pieces = texts_between(token_ids[: ends[-1]].tolist(), ends, decode)
    passes = sum(kind != ACCEPTED for kind, _, _ in runs)  # each ends with a token of the target
    return {
        "id": case.prompt_id,
        "domain": case.domain,
        "law": case.law,
        "temperature": case.sampling.temperature,
        "drafter": drafter,
        "num_draft_tokens": length,
        "acceptance_length": ends[-1] / passes,
        "prompt": case.text,
        "is_cut": ends[-1] < case.num_tokens,
        "spans": merged((kind, text) for (kind, _, _), text in zip(runs, pieces, strict=True)),
    }


def texts_between(token_ids: Sequence[int], ends: Sequence[int], decode: Decode) -> Iterator[str]:
    """The text in pieces that end with the tokens before each of `ends`; together they are all.

    A character whose bytes lie in several tokens goes with the last of them.
    """
    whole, shown = decode(token_ids), 0
    for end in ends:
        known = len(whole)
        if end < len(token_ids):
            known = max(shown, len(decode(token_ids[:end]).rstrip(UNFINISHED)))
        yield whole[shown:known]
        shown = known


def merged(spans: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Neighbours of the target's own put together; accepted drafts stay apart, one a pass."""
    found: list[list[str]] = []
    for kind, text in spans:
        if found and kind == TARGET == found[-1][0]:
            found[-1][1] += text
        elif text:
            found.append([kind, text])
    return found
