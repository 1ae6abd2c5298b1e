"""The tiny target, every drafter that has a YAML, and a cut."""

import pytest
from tiny_drafters import CUT, VOCAB_SIZE, YAML, make_drafter, tiny_model, tiny_tokenizer

from decode.types import Drafter
from drafters.base import BuildContext, TargetParts
from drafters.lm import LmDrafter


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Tiny drafters draft through oneDNN's products too."""


@pytest.fixture(scope="session")
def target() -> TargetParts:
    return TargetParts(tiny_model(), tiny_tokenizer(), VOCAB_SIZE, "tiny")


@pytest.fixture(params=sorted(YAML))
def drafter(request: pytest.FixtureRequest, target: TargetParts) -> Drafter:
    return make_drafter(request.param, target)


@pytest.fixture
def cut(target: TargetParts) -> LmDrafter:
    """Three layers of the target, whole vocabulary."""
    return CUT.build(BuildContext(target))
