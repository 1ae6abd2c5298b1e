"""Who gets which prompt: the drafter that should need the fewest target passes; nobody starves.

How many passes a drafter needs for one text is mostly chance, and a text that it has learned from
flatters it. So drafters are measured on prompts that none of them has seen, and what is shared out
by is what a ridge regression on the prompts' tokens makes of that. A drafter that is better
everywhere would take nearly all: what counts is where it is better than it is elsewhere.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.answers import Answer
from pipeline.training_data import lot

RIDGES = 10.0 ** np.arange(-1, 6)  # factors of the penalty, chosen by leaving prompts out
UNSEEN = "unseen:"  # what is hashed for it differs from what is hashed for anything else


def unseen(name: str, share: float) -> bool:
    """Whether this prompt is kept from the members until the last round."""
    return lot(UNSEEN + name) < share


def key(answer: Answer) -> str:
    """What is shared out: a prompt, answered under one law."""
    return f"{answer.law}:{answer.id}"


def text_features(answers: Sequence[Answer], embedding: Tensor) -> np.ndarray:
    """Float64 [answers, D + 1]: the mean of the tokens' rows of `embedding` [vocabulary, D], those
    of the prompt and of the answer, and the temperature.
    """
    means = [embedding[a.token_ids.to(embedding.device)].float().mean(0) for a in answers]
    temperatures = [[answer.sampling.temperature] for answer in answers]
    return np.hstack([torch.stack(means).double().cpu().numpy(), np.array(temperatures)])


def expected_passes(features: np.ndarray, rows: np.ndarray, passes: np.ndarray) -> np.ndarray:
    """[members, answers] relative passes that `features` [answers, D] let one expect.

    Learned from `passes` [members, measured] of the answers numbered `rows`, relative to the mean
    member's on the same answer (geometric), an answer counting by its passes.
    """
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    logs = np.log(passes)
    relative = (logs - logs.mean(axis=0)).T
    model = make_pipeline(StandardScaler(), RidgeCV(RIDGES))
    model.fit(features[rows], relative, ridgecv__sample_weight=passes.mean(axis=0))
    return np.exp(model.predict(features)).T


def comparative(passes: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """[members, answers] relative `passes` with each member's own level taken out.

    `shares` [answers] says whose each answer is now; all shares count alike in a member's level, so
    that neither a member that is ahead of the others everywhere nor a domain with more answers
    moves the borders.
    """
    logs = np.log(passes)
    levels = [logs[:, shares == member].mean(axis=1) for member in np.unique(shares)]
    return np.exp(logs - np.mean(levels, axis=0)[:, None])


def takers(domains: Sequence[str], wanted: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """Of each domain's prompt, the members whose `wanted` domains name it.

    A member without domains wants all; prompts that nobody wants are everyone's.
    """
    everyone = tuple(range(len(wanted)))
    return [
        tuple(m for m in everyone if not wanted[m] or domain in wanted[m]) or everyone
        for domain in domains
    ]


def by_label(ids: Sequence[str], choices: Sequence[tuple[int, ...]]) -> np.ndarray:
    """[answers] int: one of each one's `choices`, dealt by hash of its prompt's id."""
    pairs = zip(ids, choices, strict=True)
    return np.array([members[int(lot(name) * len(members))] for name, members in pairs])


def by_topic(
    features: np.ndarray, choices: Sequence[tuple[int, ...]], smallest_share: float
) -> np.ndarray:
    """[answers] int: members with the same choices part them by topic, as k-means finds it.

    Each is given at least `smallest_share` of an even part. A topic is where standardised
    `features` [answers, D] are alike.
    """
    from sklearn.cluster import KMeans
    from sklearn.preprocessing import StandardScaler

    chosen = np.empty(len(choices), dtype=np.int64)
    for members in dict.fromkeys(choices):
        rows = np.array([row for row, one in enumerate(choices) if one == members])
        count = min(len(members), len(rows))
        scaled = StandardScaler().fit_transform(features[rows])
        means = KMeans(count, n_init=10, random_state=0).fit(scaled)
        distances = means.transform(scaled).T + 1e-6  # what is lost is told as a ratio
        smallest = int(smallest_share * len(rows) / len(members))
        chosen[rows] = np.array(members)[by_passes(distances, smallest)]
    return chosen


def by_passes(passes: np.ndarray, smallest: int) -> np.ndarray:
    """[answers] int: the member with the fewest of `passes` [members, answers]; ties: the first.

    A member with fewer than `smallest` answers is given those on which it loses the least, by the
    ratio of passes, from members that can spare them.
    """
    chosen = passes.argmin(axis=0)
    counts = np.bincount(chosen, minlength=len(passes))
    for member in np.argsort(counts, kind="stable"):
        loss = passes[member] / passes.min(axis=0)
        for answer in np.argsort(loss, kind="stable"):
            if counts[member] >= smallest:
                break
            giver = chosen[answer]
            if giver != member and counts[giver] > smallest:
                chosen[answer] = member
                counts[giver] -= 1
                counts[member] += 1
    return chosen
