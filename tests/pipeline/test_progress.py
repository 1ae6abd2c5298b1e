"""Long work says how far it is.

Would catch: a rate that counts what an earlier run did; a time left that is wrong or endless; lines
more often than every ten seconds, or none at all; a bar inside a bar that breaks the display.
"""

import logging

import pytest
from rich.console import Console

from pipeline import progress as module
from pipeline.progress import Meter, duration, progress


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(module, "time", hands)
    return hands


def test_a_resumed_meter_counts_only_its_own_work(clock):
    meter = Meter("distill", 400, "steps", done=100)
    clock.now += 10
    meter.advance(20)
    assert str(meter) == "distill: 120 of 400 steps, 2.0 steps/s, 2 min 20 s left"
    meter.advance(280)
    assert "left" not in str(meter)


def test_without_a_total_there_is_no_time_left(clock):
    meter = Meter("read", None, "rows", done=0)
    assert str(meter) == "read: 0 rows"
    clock.now += 2
    meter.advance(3000)
    assert str(meter) == "read: 3,000 rows, 1,500.0 rows/s"


def test_elsewhere_a_line_every_ten_seconds_and_one_at_the_end(clock, caplog, monkeypatch):
    monkeypatch.setattr(module, "console", Console(force_terminal=False))
    with caplog.at_level(logging.INFO), progress("work", 100, "steps") as meter:
        for _ in range(25):
            clock.now += 1
            meter.advance()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert said[0].startswith("work: 10 of 100 steps, 1.0 steps/s, 1 min 30 s left")
    assert said[2].endswith("took 25 s")


def test_short_work_says_nothing(clock, caplog, monkeypatch):
    monkeypatch.setattr(module, "console", Console(force_terminal=False))
    with caplog.at_level(logging.INFO), progress("work", 3, "steps") as meter:
        meter.advance(3)
    assert caplog.records == []


def test_bars_nest_and_are_taken_away(monkeypatch, tmp_path):
    with (tmp_path / "terminal").open("w") as file:
        monkeypatch.setattr(module, "console", Console(force_terminal=True, file=file))
        with progress("outer", 2, "parts") as outer, progress("inner", 5, "steps") as inner:
            inner.advance(5)
            outer.advance()
            outer.describe("outer, loss 0.5")
            assert len(module._bars) == 1
            assert str(outer).startswith("outer, loss 0.5: 1 of 2 parts")
        with pytest.raises(KeyError), progress("broken", 1, "steps"):
            raise KeyError
    assert module._bars == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 0 s"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds, text):
    assert duration(seconds) == text
