"""Would catch: prefill counted among a text's seconds; a way that writes fewer tokens and looks
fast; a ratio the wrong way up or across rounds; a width that is not the one read; a row that grows
from pass to pass; a native way that is transformers under another name.
"""

import json
import math
from pathlib import Path

import pytest
from tiny import tiny_target_folder

from decode.clock import VirtualClock
from pipeline.bench_forward import REFERENCE, WIDTHS, Text, main, median_ratio, pass_in_turn


def test_both_backends_are_measured_side_by_side(tmp_path: Path, capsys) -> None:
    target, out = tiny_target_folder(tmp_path / "target"), tmp_path / "out" / "forward.json"
    words = [str(target), "--dtype", "float32", "--rounds", "4", "--max-new-tokens", "9"]
    main([*words, "--context-tokens", "20", "--out", str(out)])
    results = json.loads(out.read_text())
    names = ["transformers", "native, law", "native, bitwise"]
    assert list(results["plain"]) == [REFERENCE, *names]
    tokens = {row["num_tokens"] for row in results["plain"].values()}
    assert len(tokens) == 1
    for row in results["plain"].values():
        assert row["equal_texts"] == results["rounds"] == 4
        assert row["over_generate"]["low"] <= row["over_generate"]["high"]
    assert results["plain"][REFERENCE]["over_generate"]["value"] == 1
    assert list(results["passes"]) == names
    for row in results["passes"].values():
        assert [int(width) for width in row] == list(WIDTHS)
        assert row["1"]["over_one"]["value"] == 1
    printed = capsys.readouterr().out
    assert "plain decoding" in printed
    assert "one pass, ms" in printed


class Counted:
    """A target that notes what it is asked to read."""

    device = "cpu"

    def __init__(self) -> None:
        self.length, self.widths, self.lengths = 0, [], []

    def open(self) -> "Counted":
        return self

    def prefill(self, row: "Counted", ids: list[int]) -> None:
        self.length += len(ids)

    def score(self, rows: list["Counted"], ids: list[list[int]]) -> None:
        self.lengths.append(self.length)
        self.widths.append(len(ids[0]))
        self.length += len(ids[0])

    def rollback(self, row: "Counted", length: int) -> None:
        self.length = length


def test_every_pass_reads_its_width_after_the_same_context() -> None:
    ours, theirs = Counted(), Counted()
    found = pass_in_turn({"transformers": theirs, "ours": ours}, 17, 3, VirtualClock(0.5))
    assert ours.widths == theirs.widths == list(WIDTHS) * 4
    assert set(ours.lengths) == {17}
    assert found["ours"] == {width: [0.5] * 3 for width in WIDTHS}


def test_rates_leave_the_first_token_out_and_ratios_stay_within_a_round() -> None:
    assert Text([1, 2, 3, 4, 5], 2.0).rate == 2.0
    slow_then_fast = [1.0, 10.0, 100.0]
    found = median_ratio([2 * rate for rate in slow_then_fast], slow_then_fast)
    assert (found.value, found.low, found.high, found.num) == (2.0, 2.0, 2.0, 3)
    assert median_ratio([3.0, 1.0, 2.0], [1.0, 1.0, 1.0]).value == pytest.approx(2.0)


def test_a_text_that_ends_at_once_has_no_rate() -> None:
    rates = [Text([5], 0.0).rate, Text([5, 6], 0.5).rate]
    assert math.isnan(rates[0])
    assert median_ratio(rates, [1.0, 1.0]).num == 1
    assert median_ratio(rates[:1], [1.0]).num == 0
