"""Are the thresholds of top-k, top-p and min-p those of the specification, whichever way they are
found?

Would catch: a group of tokens missed; candidates packed past their room, or over those of an
earlier reading; ties at the edge of what was read counted half; top-p decided on a mass that lacks
the tail; a row left undecided; min-p without its last tie; -inf that is kept; the two ways in
disagreement. The comparison is exact: the same tokens have mass. Runs in Triton's interpreter where
there is no GPU.
"""

import pytest
import torch
from torch import Tensor

from kernels import stats as statistics
from kernels import truncate as module
from kernels import verify
from kernels.inputs import Inputs
from kernels.laws import processed_probs
from kernels.rows import Rules

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # vocabulary, groups read, candidates, columns of groups, tokens read at a time
    "whole row": (7, 128, 512, 128, 4096),
    "few groups": (1000, 4, 512, 128, 4096),
    "ragged": (4099, 8, 64, 32, 4096),
    "no room": (1000, 8, 32, 4, 4096),
    "many readings": (4099, 32, 512, 16, 256),
}
RULES = {
    "top-k": {"top_k": 5},
    "long top-k": {"top_k": 300},
    "top-p": {"top_p": 0.6},
    "wide top-p": {"top_p": 0.999},
    "min-p": {"min_p": 0.02},
    "low min-p": {"min_p": 1e-7},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "top-p and min-p": {"top_p": 0.95, "min_p": 0.05},
}


def rows_of(vocab: int, dtype: torch.dtype) -> Tensor:
    """One row of each kind [7, 1, V]."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(7, vocab, generator=generator)
    logits[0] *= 4  # peaked
    logits[1] = 0.5  # every token ties with every other
    logits[2] = (2 * logits[2]).round()  # ties everywhere
    logits[3, : vocab // 2] = -torch.inf
    logits[4] = -torch.inf
    logits[4, vocab // 3] = -7.0
    logits[5] *= 0.1  # flat
    logits[5, -1] = 1.0
    logits[6, :100] += 9  # neighbours: few groups, many candidates
    return logits[:, None].to(DEVICE, dtype)


def kept_by_kernel(logits: Tensor, temperature: float, given: dict[str, float]) -> Tensor:
    """Tokens [B, V] at or above their row's threshold, after the mass of them was checked."""
    batch, _, vocab = logits.shape
    nothing = torch.zeros(batch, 0, dtype=torch.int64, device=DEVICE)
    rules = {
        name: torch.full((batch,), value, dtype=torch.int64 if name == "top_k" else torch.float64)
        for name, value in given.items()
    }
    every = {name: rules.get(name) for name in ("top_k", "top_p", "min_p")}
    temperatures = torch.full((batch,), temperature, dtype=torch.float64)
    inputs = Inputs.of_target(
        logits, nothing, temperatures, None, *every.values(), None, None
    )  # fmt: skip
    call = verify.launch_arguments(inputs)
    if DEVICE == "cuda":  # values that ask for nothing, so that few kernels are compiled
        nothing_asked = {
            "top_k": torch.zeros(batch, dtype=torch.int64),
            "top_p": torch.ones(batch, dtype=torch.float64),
            "min_p": torch.zeros(batch, dtype=torch.float64),
        }
        every = {name: rules.get(name, nothing_asked[name]) for name in every}
    on_device = Rules(*(None if x is None else x.to(DEVICE) for x in every.values()))
    stats = statistics.row_statistics(call, logits.device, on_device)
    cut = module.truncate(call, stats, on_device)
    row = logits[:, 0].float()
    if given.get("top_k", 0) >= vocab and len(given) == 1:
        assert bool((cut.masses == -1).all())
        return row > -torch.inf
    kept = (row >= cut.thresholds) & (row > -torch.inf)
    weights = ((row.double() - row.amax(-1, keepdim=True)) / temperature).exp()
    masses = torch.where(kept, weights, 0).sum(-1)
    torch.testing.assert_close(cut.masses[:, 0], masses, rtol=1e-12, atol=0)
    return kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_kept_tokens(
    rules: dict[str, float],
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab, *sizes = shape
    for name, size in zip(("GROUPS_READ", "CANDIDATES", "COLUMNS", "READ"), sizes, strict=True):
        monkeypatch.setattr(module, name, size)
    logits = rows_of(vocab, dtype)
    for temperature in (0.7, 3.0):
        wanted = processed_probs(
            logits[:, 0],
            torch.full((7,), temperature, dtype=torch.float64),
            **{
                name: torch.full((7,), value, dtype=None if name == "top_k" else torch.float64)
                for name, value in rules.items()
            },
        )
        assert torch.equal(kept_by_kernel(logits, temperature, rules), wanted > 0)
