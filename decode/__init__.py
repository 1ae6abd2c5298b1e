"""The lossless decoder: choose, propose, score, verify, advance, learn."""

from decode.decoder import SpeculativeDecoder
from decode.results import GenerationResult, Metrics, StreamChunk
from decode.types import Sampling
from kernels.types import Verification

__all__ = [
    "GenerationResult",
    "Metrics",
    "Sampling",
    "SpeculativeDecoder",
    "StreamChunk",
    "Verification",
]
