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
    """Advances by `tick` seconds at every reading: equal code paths take equal time.

    The usual tick is a power of two, so that a difference of readings has no rounding in it and
    does not depend on how many came before, as in a run that was killed and went on.
    """

    def __init__(self, tick: float = 2**-10) -> None:
        self.tick = tick
        self.readings = 0

    def now(self) -> float:
        self.readings += 1
        return self.readings * self.tick
