"""What several rooms' tests share. This folder is on the path, so that they can import `fakes`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeline  # noqa: F401  before torch, for which it sets how long threads spin

# isort: split
import torch

if not torch.cuda.is_available():
    # Triton chooses its interpreter when it is imported, which any test may do first.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """oneDNN shares out the smallest product; on a busy machine tiny models would mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default target's Hugging Face folder, found or fetched as the pipeline does it."""
    from hydra import compose, initialize_config_module

    from pipeline.config import typed
    from pipeline.models import resolve_target

    with initialize_config_module("conf", version_base="1.3"):
        config = compose("config", overrides=["target=smollm2"])
    return resolve_target(typed(config.target, "target"))
