"""Time enters decoding through one object, so that a run can be replayed."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment."""


class SystemClock:
    """The machine's monotonic clock. On CUDA the caller synchronises before it reads."""

    def now(self) -> float:
        return time.perf_counter()


class VirtualClock:
    """Advances by `tick` seconds at every reading: equal code paths take equal time."""

    def __init__(self, tick: float = 1e-3) -> None:
        self.tick = tick
        self.readings = 0

    def now(self) -> float:
        self.readings += 1
        return self.readings * self.tick
