"""What a person types, and the one sentence they get when it cannot be done.

Would catch: a traceback for a typo; a wrong exit code; a message without the value, the closest
match or the next step; something written although nothing ran; a mistake of the program hidden as
a user's; a menu that builds, or that does not say what is there; a flag that starts a stage.
"""

import errno
import logging
import warnings
from pathlib import Path

import pytest

from pipeline import __main__ as cli
from pipeline import errors
from pipeline.__main__ import main
from pipeline.manifest import MANIFEST
from pipeline.stage import Pipeline


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to run in, an empty cache, no Hub, and pytest's own logging."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(cli, "set_up_logging", lambda debug: None)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main([*arguments])
    out, err = capsys.readouterr()
    return code, out, err


TYPOS = {
    ("stge=prepare",): "did you mean stage=prepare?",
    ("stage=prepar",): "did you mean stage=prepare?",
    ("stages=prepare",): "did you mean stage=prepare?",
    ("stage=3",): "stage=3 is not known; use one of:",
    ("prepare",): "prepare has no value; write KEY=VALUE, as in stage=prepare",
    ("=3",): "=3 has no key",
    ("stage=[",): "stage=[ cannot be read as KEY=VALUE",
    ("seed=1,2",): "seed=1,2 names several values; run the command once for each",
    ("seed=abc",): "seed=abc is not an integer",
    ("seed=-1",): "seed=-1 must lie between",
    ("force=maybe",): "force=maybe is not true or false",
    ("data=jsonll",): "data=jsonll is not known; did you mean data=jsonl?",
    ("data=3",): "data=3 is not known; use one of: embedded, hub, jsonl",
    ("experiment=null",): "experiment=null is not known",
    ("experiment=quik",): "did you mean experiment=quick?",
    ("target=smollm",): "did you mean target=smollm2?",
    ("min_prompts=3",): "did you mean stages.prepare.min_prompts=3?",
    ("stages.prepare.min_promts=3",): "did you mean stages.prepare.min_prompts=3?",
    ("stages.prepare.min_prompts=few", "stage=all"): "min_prompts=few is not an integer",
    ("stages.prepare.test_percent=95",): "95 percent",
    ("+x=1",): "x=1 sets a key that does not exist",
    ("+target.x=1",): "target.x is not a key of target",
    ("~nope",): "'nope' does not exist",
    ("data={a:1}",): "cannot be composed",
    ("data=jsonl", "stage=prepare"): "data.train has no value yet; add data.train=VALUE",
    ("target=local", "stage=regenerate"): "target.name_or_path has no value yet",
    ("pool.entries.code.init_from=generc",): "did you mean pool.entries.code.init_from=generic?",
    ("pool.entries.code.trained_by=tune",): "pool.entries.code.trained_by=tune is not known",
    ("stage=all", "entry=code"): "entry=code goes with stage=finetune or stage=distill",
    ("stage=distill", "entry=code"): "entry=code is not trained by stage=distill",
    ("--cgf",): "--cgf is not an option; did you mean --cfg job?",
    ("--multirun", "seed=1"): "--multirun is not an option",
}


@pytest.mark.parametrize("typed", TYPOS, ids=" ".join)
def test_a_typo_is_one_sentence_and_nothing_is_written(capsys, tmp_path, typed):
    code, out, err = run(capsys, *typed)
    assert TYPOS[typed] in err
    assert code in (1, 2)
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_typos_end_with_code_two_and_failures_with_one(capsys):
    assert run(capsys, "stge=prepare")[0] == 2
    assert run(capsys, "seed=abc")[0] == 2
    code, _, err = run(capsys, "stage=regenerate", "target=local", "target.name_or_path=./none")
    assert code == 1
    assert "./none is not a folder; give a model folder that exists" in err
    assert run(capsys, "data=jsonl", "data.train=nope.jsonl", "stage=prepare")[0] == 1


def test_a_stage_runs_and_is_found_again(capsys, tmp_path, monkeypatch):
    arguments = ("stage=prepare", "tracking=disabled", "root=made")
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "drafter_train" in out
    (manifest,) = (tmp_path / "made").glob(f"prepare/*/{MANIFEST}")
    before = manifest.stat().st_mtime_ns
    assert run(capsys, *arguments)[0] == 0
    assert manifest.stat().st_mtime_ns == before
    assert run(capsys, *arguments, "force=true")[0] == 0
    assert manifest.stat().st_mtime_ns > before


def test_what_was_asked_for_is_shown_each_time_and_no_line_wraps(capsys, monkeypatch):
    long = "x" * 300
    monkeypatch.setattr("pipeline.prepare.Prepare.shown", lambda self, out: long, raising=False)
    for _ in range(2):  # built, then found again
        _, out, _ = run(capsys, "stage=prepare", "tracking=disabled", "root=made")
        assert out.splitlines()[-1] == long


@pytest.mark.parametrize("flags", [(), ("--help",), ("seed=1",), ("-h", "stage=prepare")])
def test_the_menu_lists_every_stage_and_builds_nothing(capsys, tmp_path, flags):
    code, out, _ = run(capsys, *flags)
    assert code == 0
    for name in cli.compose_config([]).stages:
        assert any(line.startswith(str(name)) for line in out.splitlines()), name
    assert "python -m pipeline stage=all" in out
    assert not (tmp_path / "outputs").exists()
    assert not (tmp_path / "cache" / "models").exists()


def test_the_menu_says_what_is_there(capsys):
    _, before, _ = run(capsys)
    assert "found" not in before
    assert "not fetched yet" in before
    assert run(capsys, "stage=prepare", "tracking=disabled")[0] == 0
    _, after, _ = run(capsys)
    (line,) = [line for line in after.splitlines() if line.startswith("prepare")]
    assert "found" in line
    _, other, _ = run(capsys, "seed=1")
    assert "found" not in other


def test_the_composed_config_is_printed_and_nothing_runs(capsys, tmp_path):
    code, out, _ = run(capsys, "--cfg", "job", "stage=prepare", "seed=7")
    assert code == 0
    assert "seed: 7" in out
    assert "min_prompts:" in out
    assert list(tmp_path.iterdir()) == []


def failing(error: BaseException):
    def fail(*_: object) -> None:
        raise error

    return fail


FAILURES = [
    (KeyboardInterrupt(), 130, "stopped; what is finished is kept"),
    (OSError(errno.ENOSPC, "No space left", "/x/y"), 1, "/x/y cannot be written: the disk is full"),
    (PermissionError(errno.EACCES, "no", "/x"), 1, "permission denied; choose a folder with root="),
    (ValueError("one clear sentence"), 1, "one clear sentence"),
]


@pytest.mark.parametrize(("error", "code", "sentence"), FAILURES)
def test_a_failure_is_one_sentence(capsys, monkeypatch, error, code, sentence):
    monkeypatch.setattr(Pipeline, "run", failing(error))
    found, _, err = run(capsys, "stage=prepare", "tracking=disabled")
    assert found == code
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize("how", ["key", "environment"])
def test_debug_shows_where_an_error_came_from(capsys, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="is not a file"):
        main(
            ["stage=prepare", "data=jsonl", "data.train=nope.jsonl"]
            + (["debug=true"] if how == "key" else [])
        )


def test_a_mistake_of_the_program_is_not_hidden(capsys, monkeypatch):
    monkeypatch.setattr(Pipeline, "run", failing(AssertionError("ours")))
    with pytest.raises(AssertionError, match="ours"):
        main(["stage=prepare", "tracking=disabled"])


def test_a_librarys_value_error_says_how_to_see_more(capsys, monkeypatch):
    monkeypatch.setattr(Pipeline, "run", lambda *_: int("x"))
    monkeypatch.setattr(errors, "ROOMS", Path("/elsewhere"))
    code, _, err = run(capsys, "stage=prepare", "tracking=disabled")
    assert code == 1
    assert "(debug=true shows where)" in err


def test_log_lines_are_readable_and_libraries_quiet(capsys):
    root, level = logging.getLogger(), logging.getLogger("transformers").level
    before, filters = (list(root.handlers), root.level), list(warnings.filters)
    try:
        errors.set_up_logging(debug=False)
        logging.getLogger("pipeline").info("stage=%s begins", "toy")
        logging.getLogger("pipeline").warning("careful")
        logging.getLogger("transformers").warning("noise")
    finally:
        root.handlers, root.level = before
        logging.getLogger("transformers").setLevel(level)
        warnings.filters[:] = filters
    err = capsys.readouterr().err
    first, second = err.splitlines()
    assert first[2] == first[5] == ":"
    assert first.endswith("stage=toy begins")
    assert second.startswith("warning: ")
