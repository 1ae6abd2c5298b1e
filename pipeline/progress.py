"""How far a piece of work is: a bar on a terminal, a log line every ten seconds elsewhere."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

log = logging.getLogger(__name__)

console = Console(stderr=True)  # log lines and bars share it, so that neither tears the other
WIDE = 200  # columns of a page that is no terminal: room for every table
LOG_EVERY_SECONDS = 10.0
QUIET_SECONDS = 2.0  # work that ends sooner is not worth a line


class Meter:
    """Counts what is done and says the rate and the time left."""

    def __init__(self, description: str, total: int | None, unit: str, done: int) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.done = self._first = done
        self._started = self._said = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def advance(self, n: int = 1) -> None:
        """`n` more units are done."""
        self.done += n
        self._show()

    def describe(self, description: str) -> None:
        """Change what stands before the bar, for example to add the current loss."""
        self.description = description
        self._show()

    def __str__(self) -> str:
        """As in "distill: 120 of 400 steps, 3.2 steps/s, 1 min 28 s left"."""
        seconds = time.monotonic() - self._started
        rate = (self.done - self._first) / seconds if seconds > 0 else 0.0
        of_total = "" if self.total is None else f" of {self.total:,}"
        text = f"{self.description}: {self.done:,}{of_total} {self.unit}"
        if rate > 0:
            text += f", {rate:,.1f} {self.unit}/s"
            if self.total is not None and self.done < self.total:
                text += f", {duration((self.total - self.done) / rate)} left"
        return text

    def _show(self) -> None:
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, description=str(self))
        elif now - self._said >= LOG_EVERY_SECONDS:
            self._said = now
            log.info("%s", str(self))  # formatted now: the meter moves on

    def _close(self) -> None:
        seconds = time.monotonic() - self._started
        if seconds >= QUIET_SECONDS:
            log.info("%s, took %s", str(self), duration(seconds))


_bars: list[Progress] = []  # the one display that nested work shares


@contextmanager
def progress(description: str, total: int | None, unit: str, done: int = 0) -> Iterator[Meter]:
    """A meter for `total` units of work (None: unknown); a resumed run has `done` behind it."""
    meter = Meter(description, total, unit, done)
    if not console.is_terminal:
        yield meter
        meter._close()
        return
    outermost = not _bars
    if outermost:
        _bars.append(
            Progress(
                BarColumn(20), TextColumn("{task.description}"), console=console, transient=True
            )
        )
        _bars[0].start()
    meter._bar = _bars[0]
    meter._task = meter._bar.add_task(str(meter), total=total, completed=done)
    try:
        yield meter
    finally:
        meter._bar.remove_task(meter._task)
        if outermost:
            _bars.pop().stop()
    meter._close()


def duration(seconds: float) -> str:
    """Seconds as people say them: "0.4 s", "12 s", "3 min 5 s", "2 h 10 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
