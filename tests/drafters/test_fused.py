"""Would catch: a network that learns something else on a GPU than on a CPU; the kernel asked where
only the target's largest logits are known; chances for "gain" taken from another token.

The kernel itself is tested in tests/kernels/test_divergence.py. Tolerances: float32 in another
order, 2e-5 absolute and 1e-4 relative on gradients, as for chunks.
"""

from dataclasses import replace

import pytest
import torch
from test_training import NETWORKS, PROMPTS, Unsplit, answers, gradients, networks
from tiny_drafters import VOCAB_SIZE, Answer, objective

from drafters import fused, training
from drafters.base import TargetParts
from drafters.losses import LOSSES
from drafters.training import LossModule, collate, teacher_of

__all__ = ["answers"]  # a fixture
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the tiny models are on the CPU, where Triton interprets"
)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel wherever it could run; how many tokens it has seen, call by call."""
    monkeypatch.setattr(training, "on_gpu", lambda states: True)
    calls: list[int] = []
    run = fused.FusedLosses._run

    def counted(self, logits, weights, low):
        calls.append(len(logits))
        return run(self, logits, weights, low)

    monkeypatch.setattr(fused.FusedLosses, "_run", counted)
    return calls


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("loss", [*LOSSES, "all"])
def test_the_kernel_teaches_what_autograd_does(
    answers: list[Answer], target: TargetParts, everywhere: list[int], kind: str, loss: str
) -> None:
    network = networks(target)[kind]()
    batch = collate(answers, VOCAB_SIZE, 99, with_teacher=False)
    batch = replace(batch, teacher=teacher_of(target.model, batch))
    mix = dict.fromkeys(LOSSES, 0.3) if loss == "all" else {loss: 0.7}
    goal = objective(**mix, position_weights="gain" if loss == "all" else "decay")
    found = LossModule(network, goal, VOCAB_SIZE, 10)(batch)
    left = gradients(network, found)
    assert sum(everywhere) == (2 if loss == "all" else 1) * batch.num_tokens
    wanted = Unsplit(network, goal, VOCAB_SIZE, 1)(batch)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=2e-5)
    right = gradients(network, wanted)
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=2e-5, rtol=1e-3, msg=name)


def test_a_record_of_the_largest_logits_is_left_to_autograd(
    answers: list[Answer], target: TargetParts, everywhere: list[int]
) -> None:
    network = networks(target)["frozen head"]()
    batch = collate(answers, VOCAB_SIZE, 99)
    assert len(PROMPTS) == len(batch.token_ids)
    LossModule(network, objective(forward_kl=1.0), VOCAB_SIZE, 10)(batch).backward()
    assert everywhere == []
