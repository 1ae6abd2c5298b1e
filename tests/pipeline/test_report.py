"""Bugs these tests would catch: a recommendation whose interval does not clear 1.0, or rests on one
prompt; the fastest point estimate preferred to one that is proven; one law's result told for the
other; a drafter left out of what it would need, or measured at a K that is not its best; null in
results read as a number; a page that injects markup from a model's name; NaN that reaches JSON or a
table.
"""

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.headline import finite, replay_error
from pipeline.report import as_text, audit_text, findings, wall_table, write_report
from pipeline.verdict import (
    best_lengths,
    deployment_sentence,
    recommendations,
    recommended,
    requirement_lines,
    requirements,
)

METHODS = ("plain", "best fixed", "router only", "policy cold", "policy + router")


def ratio(value: float, low: float | None, high: float | None, num: int = 12) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "num": num}


def wall_row(law: str, method: str, speed: dict[str, Any], domain: str = "all") -> dict[str, Any]:
    return {
        "law": law,
        "domain": domain,
        "method": method,
        "arm": "ngram K=4" if method == "best fixed" else "",
        "num_prompts": 12,
        "num_tokens": 700,
        "tokens_per_second": 20 * speed["value"],
        "speed_ratio": speed,
        "acceptance_length": 1.5,
        "break_even_length": 1.5 / speed["value"],
        "acceptance_rate": math.nan if method == "plain" else 0.4,
        "draft_ms": 1.0,
        "verify_ms": 50.0,
        "host_ms": 0.1,
        "prefill_ms": 100.0,
        "p50_token_ms": 40.0,
        "p95_token_ms": 60.0,
        "share_of_steps_off": 0.25,
        "drafters": {} if method == "plain" else {"ngram": 0.75},
        "distinct_8gram_share": math.nan,
        "dropped": {},
    }


def grid_row(law: str, drafter: str, k: int, has: float, needs: float) -> dict[str, Any]:
    return {
        "law": law,
        "domain": "all",
        "drafter": drafter,
        "num_draft_tokens": k,
        "acceptance_length": has,
        "break_even_length": needs,
        "tokens_per_second": 20 * has / needs,
        "share_of_steps_off": 0.0,
        "speed_ratio": ratio(has / needs, has / needs - 0.1, has / needs + 0.1),
    }


def results(greedy: dict[str, Any], sampled: dict[str, Any]) -> dict[str, Any]:
    """Results in which each law's methods have these speed ratios; plain has 1."""
    wall = [
        wall_row(law, method, speeds.get(method, ratio(1.0, 1.0, 1.0)))
        for law, speeds in (("greedy", greedy), ("sampled", sampled))
        for method in METHODS
    ]
    grid = [
        grid_row(law, drafter, k, has, needs)
        for law in ("greedy", "sampled")
        for drafter, k, has, needs in (
            ("off", 0, 1.0, 1.0),
            ("ngram", 2, 1.40, 1.20),
            ("ngram", 4, 1.71, 1.29),
            ("code", 2, 1.50, 1.90),
            ("code", 4, 1.60, 2.60),
        )
    ]
    replay = [
        {
            "law": law,
            "domain": "all",
            "policy": name,
            "tokens_per_second": 22.0,
            "acceptance_length": 1.3,
            "share_of_steps_off": 0.1,
            "speed_ratio": ratio(1.1, 1.0, 1.2),
            "ratio_to_best_fixed": ratio(1.0, 0.9, 1.1),
            "oracle_gap_closed": math.nan,
        }
        for law in ("greedy", "sampled")
        for name in ("plain", "best fixed", "policy cold", "router_only + router")
    ]
    training = {
        "acceptance_length_before": 1.0,
        "acceptance_length_after": 1.6,
        "acceptance_length_gain": 0.6,
        "acceptance_length_gain_low": 0.5,
        "acceptance_length_gain_high": 0.7,
    }
    return {
        "conditions": {
            "hardware": {"cpu": "EPYC", "cores": 2, "gpu": "idle"},
            "device": "cpu",
            "target": "small<model>",
            "dtype": "float32",
            "backend": "native",
            "pool": ["ngram", "code"],
            "temperatures": {"greedy": 0.0, "sampled": 0.8},
            "command": "python -m pipeline stage=evaluate",
        },
        "wall": wall,
        "grid": grid,
        "replay": replay,
        "audit": {
            "compared": {"best fixed": 12},
            "different": {"best fixed": 1},
            "largest_gap": 1e-6,
            "differences": [{"id": "p", "method": "best fixed", "position": 3, "gap": 1e-6}],
        },
        "training": [{"drafter": "code", **training}],
        "replay_error": [],
        "deployment": "Deploy & see.",
        "requirements": [
            requirement("ngram", "greedy", 0.0, (4, 1.71, 1.29)),
            requirement("ngram", "sampled", 0.8, (4, 1.71, 1.29)),
            requirement("code", "greedy", 0.0, (2, 1.5, 1.9)),
            requirement("code", "sampled", 0.8, (None, None, None)),
        ],
    }


def requirement(
    drafter: str, law: str, temperature: float, figures: tuple[Any, Any, Any]
) -> dict[str, Any]:
    names = ("num_draft_tokens", "acceptance_length", "break_even_length")
    found = dict(zip(names, figures, strict=True))
    return {"drafter": drafter, "law": law, "temperature": temperature, **found}


def with_learning(found: dict[str, Any]) -> dict[str, Any]:
    """The same results with everything that newer stages add."""
    curves = [
        {"drafter": drafter, "curve": curve, "step": step, "value": 1 + 1 / (step + 1)}
        for drafter in ("code", "generic")
        for curve in ("loss", "acceptance_length", "acceptance_length/chat")
        for step in (0, 10, 20)
    ]
    acceptance = [
        {
            "drafter": drafter,
            "domain": domain,
            "split": split,
            "law": law,
            "tokens": 500,
            "passes": 400,
            "acceptance_length": value,
            "low": 1.0,
            "high": None,
        }
        for law in ("greedy", "sampled", "elsewhere")
        for drafter, value in (("ngram", 1.25), ("code<b>", math.nan))
        for split, domain in (("test", "code"), ("test", "chat"), ("mixed", "mixed"))
    ]
    cost = {
        "drafter": "code",
        "stage": "finetune",
        "seconds": 75.0,
        "step_seconds": 61.0,
        "num_steps": 200,
        "best_step": 0,
        "num_tokens": 12345,
        "tokens_per_second": 1999.7,
        "flop_utilisation": 0.314,
        "num_processes": 2,
        "num_parameters": 15_339_456,
        "hardware": "GPU & co",
    }
    unknown = dict.fromkeys(cost, None) | {"drafter": "old", "stage": "distill"}
    sample = {
        "id": "p1",
        "domain": "chat",
        "law": "greedy",
        "temperature": 0.0,
        "drafter": "ngram",
        "num_draft_tokens": 4,
        "acceptance_length": 1.5,
        "prompt": "What is <b>?\nSay it.",
        "is_cut": True,
        "spans": [["target", "It "], ["accepted", "is </p>"], ["refused", " &lt;"]],
    }
    return found | {
        "curves": curves,
        "acceptance_by_domain": acceptance,
        "training_cost": [cost, unknown | {"seconds": 3.0, "hardware": "CPU"}],
        "stage_seconds": [
            {"stage": "prepare", "signature": "0ab1", "seconds": 0.4, "hardware": "CPU"}
        ],
        "samples": [sample, sample | {"drafter": "code", "is_cut": False}, sample | {"id": "p2"}],
    }


def test_the_fastest_method_that_clears_one_is_named_with_its_interval() -> None:
    found = results(
        greedy={
            "best fixed": ratio(1.18, 1.08, 1.28),
            "policy + router": ratio(1.31, 1.20, 1.42),
            "policy cold": ratio(1.50, 0.97, 2.00),  # faster, but not proven
        },
        sampled={"best fixed": ratio(1.05, 1.01, 1.10), "policy cold": ratio(1.02, 0.90, 1.20)},
    )
    sentence = deployment_sentence(found)
    assert "policy + router at temperature 0 (1.31x [1.20, 1.42]" in sentence
    assert "best fixed (ngram K=4) at temperature 0.8 (1.05x [1.01, 1.10]" in sentence
    assert "plain decoding at temperature" not in sentence


@pytest.mark.parametrize("low", [1.0, 0.97, None, math.nan])
def test_nothing_is_recommended_that_does_not_clear_one(low: float | None) -> None:
    speed = {"policy + router": ratio(1.2, low, 1.4, num=1)}
    found = results(greedy=speed, sampled=speed)
    assert recommended("greedy", found["wall"]) is None
    sentence = deployment_sentence(found)
    assert "deploy plain decoding" in sentence
    assert "policy + router" in sentence  # how near the nearest came is said
    assert "does not clear 1" in sentence


def test_laws_are_judged_apart() -> None:
    found = results(
        greedy={"policy cold": ratio(1.4, 1.3, 1.5)},
        sampled={"policy cold": ratio(0.8, 0.7, 0.9)},
    )
    sentence = deployment_sentence(found)
    assert "policy cold at temperature 0 (1.40x [1.30, 1.50]" in sentence
    assert "plain decoding at temperature 0.8" in sentence


def test_domains_do_not_speak_for_all() -> None:
    found = results(greedy={}, sampled={})
    found["wall"].append(wall_row("greedy", "best fixed", ratio(2.0, 1.9, 2.1), domain="code"))
    assert recommended("greedy", found["wall"]) is None


def test_one_sentence_and_its_fields_say_the_same() -> None:
    found = results(greedy={"policy cold": ratio(1.4, 1.3, 1.5)}, sampled={})
    sentence = deployment_sentence(found)
    assert sentence.count("\n") == 0
    assert sentence.endswith(".")
    assert ". " not in sentence
    greedy, sampled = recommendations(found)
    assert greedy["law"] == "greedy"
    assert greedy["method"] == "policy cold"
    assert greedy["speed_ratio"] == ratio(1.4, 1.3, 1.5)
    assert (sampled["method"], sampled["speed_ratio"]) == ("plain", None)


def test_every_drafter_is_told_what_it_has_and_needs_at_its_best_k() -> None:
    found = results(greedy={}, sampled={})
    for row in found["grid"]:
        if (row["drafter"], row["law"]) == ("code", "sampled"):
            row["tokens_per_second"] = math.nan
    rows = requirements(found)
    assert rows == found["requirements"]
    assert requirement_lines(rows) == [
        "ngram: emits 1.71 a pass, breaks even at 1.29 (T=0, K=4); "
        "emits 1.71 a pass, breaks even at 1.29 (T=0.8, K=4)",
        "code: emits 1.50 a pass, breaks even at 1.90 (T=0, K=2); not measured (T=0.8)",
    ]
    assert best_lengths(found) == {
        ("ngram", "greedy"): 4,
        ("ngram", "sampled"): 4,
        ("code", "greedy"): 2,
    }


def test_the_page_is_whole_and_escapes_what_it_shows(tmp_path: Path) -> None:
    found = results(greedy={"best fixed": ratio(1.2, 1.1, 1.3)}, sampled={})
    page = write_report(found, tmp_path).read_text(encoding="utf-8")
    assert "Deploy &amp; see." in page
    assert "small&lt;model&gt;" in page
    assert "small<model>" not in page
    assert page.count("data:image/png;base64,") == 4
    assert "nan" not in page.replace("nant", "").lower().split("base64")[0]
    for word in ("break-even length", "acceptance length", "Conditions", "epyc"):
        assert word.lower() in page.lower()
    assert "<li>code: emits 1.50 a pass, breaks even at 1.90 (T=0, K=2)" in page
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert names == ["grid.png", "replay.png", "speed.png", "training.png"]


def test_what_was_learned_is_on_the_page(tmp_path: Path) -> None:
    found = with_learning(results(greedy={}, sampled={}))
    page = write_report(found, tmp_path).read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 6
    assert {path.stem for path in tmp_path.glob("*.png")} >= {"acceptance", "curves"}
    text = "<td>code</td><td>finetune</td><td>1 min 15 s</td><td>1 min 1 s</td><td>200</td>"
    assert text + "<td>0: its start was best</td><td>12,345</td><td>2,000</td><td>31%</td>" in page
    assert "2 x GPU &amp; co" in page
    assert "<td>old</td><td>distill</td><td>3.0 s</td>" + 7 * "<td>-</td>" + "<td>CPU</td>" in page
    assert "<td>prepare</td><td>0ab1</td><td>0.4 s</td>" in page
    assert "code&lt;b&gt;" in page
    assert "code<b>" not in page
    Outline().feed(page)


def test_samples_are_marked_escaped_and_grouped_by_prompt(tmp_path: Path) -> None:
    found = with_learning(results(greedy={}, sampled={}))
    page = write_report(found, tmp_path).read_text(encoding="utf-8")
    marked = (
        '<span class="accepted">is &lt;/p&gt;</span><span class="refused"> &amp;lt;</span> …</p>'
    )
    assert page.count(marked) == 2  # the third is whole
    assert page.count("chat, temperature 0: What is &lt;b&gt;? Say it.</summary>") == 2
    assert page.count("<details open>") == 1
    assert "ngram, K=4: 1.50 tokens a pass" in page


class Outline(HTMLParser):
    """Refuses a page whose tags do not close in order, or that asks for another file."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        asked = [value or "" for name, value in attrs if name in ("src", "href")]
        assert all(value.startswith("data:") for value in asked)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_pictures_of_equal_results_are_equal(tmp_path: Path) -> None:
    found = results(greedy={"best fixed": ratio(1.2, 1.1, 1.3)}, sampled={})
    pages = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        pages.append(write_report(found, tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_the_terminal_table_shows_all_methods_of_both_laws() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(wall_table(results(greedy={"best fixed": ratio(1.2, 1.1, 1.3)}, sampled={})))
    text = console.export_text()
    assert text.count("policy + router") == 2
    assert "best fixed (ngram K=4)" in text
    assert "1.20x [1.10, 1.30]" in text


def test_where_no_terminal_is_nothing_wraps() -> None:
    found = results(greedy={"best fixed": ratio(1.2, 1.1, 1.3)}, sampled={})
    found["deployment"] = "word " * 80
    lines = as_text(findings(found)).splitlines()
    assert any("best fixed (ngram K=4)" in line and "1.20x [1.10, 1.30]" in line for line in lines)
    assert ("word " * 80).strip() in lines
    assert lines[-1].startswith("  code: emits 1.50 a pass")


def test_the_audit_says_what_differed_and_how_near_the_tie_was() -> None:
    text = audit_text(results(greedy={}, sampled={})["audit"])
    assert "best fixed 1 of 12" in text
    assert "1e-06" in text
    assert "No greedy law" in audit_text({"compared": {}, "different": {}, "differences": []})


def test_what_is_not_finite_becomes_null() -> None:
    found = finite({"a": [math.nan, 1.0, {"b": math.inf}], "c": (1, "x")})
    assert json.dumps(found, allow_nan=False) == '{"a": [null, 1.0, {"b": null}], "c": [1, "x"]}'


def test_results_read_back_from_json_give_the_same_sentence() -> None:
    found = results(greedy={"policy cold": ratio(1.2, math.nan, math.nan, num=1)}, sampled={})
    again = json.loads(json.dumps(finite(found), allow_nan=False))
    assert deployment_sentence(again) == deployment_sentence(found)


def test_replay_is_held_against_wall_clock_for_the_same_method_and_law() -> None:
    found = results(greedy={"best fixed": ratio(1.25, 1.1, 1.4)}, sampled={})
    rows = {(r["law"], r["method"]): r for r in replay_error(found["wall"], found["replay"])}
    assert set(rows) == {
        (law, m)
        for law in ("greedy", "sampled")
        for m in ("best fixed", "router only", "policy cold")
    }
    assert rows[("greedy", "best fixed")]["error"] == pytest.approx(1.1 / 1.25 - 1)


def test_a_gpu_that_lay_idle_is_not_named() -> None:
    assert "On EPYC (2 cores) deploy" in deployment_sentence(results(greedy={}, sampled={}))
