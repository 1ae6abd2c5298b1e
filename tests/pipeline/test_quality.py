"""Would catch: a program that writes elsewhere, starts processes, reaches the network, signals its
parent, eats the machine's memory or never ends; a program that is taken for right because it ended
before its tests; secrets in its environment; files left behind; right answers graded wrong and
wrong ones right, in every shape in which chat models write code and numbers.

The layers of the sandbox are tested one by one, each without the others, because the first that
refuses hides what the next would have done.
"""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pipeline.quality import child
from pipeline.quality.extraction import blocks, function_program, script
from pipeline.quality.final import final_answer, is_right, same
from pipeline.quality.grading import Problem, grade
from pipeline.quality.sandbox import (
    ERROR,
    FAILED,
    LAYERS,
    PASSED,
    TIMEOUT,
    Limits,
    Outcome,
    layers,
)
from pipeline.quality.sandbox import run_program as run

QUICK = Limits(5.0)


# ------------------------------------------------------------------------------------------ sandbox


def test_a_program_passes_fails_or_is_none():
    assert run("assert 1 + 1 == 2", QUICK).status == PASSED
    assert run("assert 1 + 1 == 3, 'sum'", QUICK) == Outcome(FAILED, "AssertionError: sum")
    assert run("x = [1][5]", QUICK).detail.startswith("IndexError")
    assert run("def f(:", QUICK).status == ERROR
    assert run("import dataclasses, heapq, re, decimal, statistics, typing", QUICK).status == PASSED


@pytest.mark.parametrize("ending", ["import os; os._exit(0)", "import sys; sys.exit(0)", "exit()"])
def test_ending_early_is_not_passing(ending):
    assert run(f"{ending}\nassert False", QUICK).status in (FAILED, ERROR)


def test_changing_the_interpreters_functions_changes_no_verdict():
    program = "import os, json, builtins\nos.write = os._exit = json.dumps = builtins.open = None\n"
    assert run(program, QUICK).status == PASSED
    assert run(program + "assert False", QUICK).status == FAILED
    forged = 'open(\'report.json\', \'w\').write(\'{"status": "passed", "token": ""}\')\n'
    assert run(f"{forged}import os; os._exit(0)", QUICK).status == ERROR


def test_it_stops_what_does_not_end():
    started = time.monotonic()
    for loop in (
        "while True: pass",
        "import time; time.sleep(60)",
        "while True:\n try:\n  while True: pass\n except BaseException: pass",
    ):
        assert run(loop, Limits(0.5)).status == TIMEOUT
    assert time.monotonic() - started < 5


def test_memory_and_files_are_limited():
    assert run("x = bytearray(3 * 2**30)", QUICK).status == ERROR
    assert run("x = [0]\nwhile True: x = x + x", QUICK).status == ERROR
    assert run("open('big', 'wb').write(bytes(2**22))", QUICK).status != PASSED
    assert run("files = [open(str(n), 'w') for n in range(1000)]", QUICK).status == FAILED


def test_nothing_is_inherited(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    program = """
        import os
        assert set(os.environ) <= {"LC_ALL", "LC_CTYPE"}, dict(os.environ)
        assert os.listdir() == ["report.json"]
        try:
            input()
        except EOFError:
            pass
        else:
            assert False
        for number in range(5, 30):
            try:
                os.fstat(number)
            except OSError:
                continue
            assert False, number
    """
    outcome = run(textwrap.dedent(program), QUICK)
    assert outcome.status == PASSED, outcome


@pytest.mark.parametrize(
    "escape",
    [
        "open({path!r}, 'w')",
        "open({path!r}, 'a')",
        "import os; os.open({path!r}, os.O_WRONLY | os.O_CREAT)",
        "import os; os.mkdir({path!r})",
        "import os; os.symlink('/etc', {path!r})",
        "import os; os.symlink('/', 'up'); open('up' + {path!r}, 'w')",
        "import pathlib; pathlib.Path({path!r}).touch()",
        "import os; os.remove({there!r})",
        "import os; os.rename({there!r}, {path!r})",
        "import os; os.chmod({there!r}, 0)",
        "import shutil; shutil.rmtree({folder!r})",
        "import os; os.system('touch ' + {path!r})",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "import threading; threading.Thread(target=print).start()",
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 1))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1')",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.killpg(0, 9)",
        "import ctypes; ctypes.CDLL(None).getpid()",
        "import os; os.execv('/bin/true', ['true'])",
        "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (9, 9))",
    ],
)
def test_an_escape_fails(escape, tmp_path):
    there = tmp_path / "there"
    there.write_text("kept")
    names = {"path": str(tmp_path / "new"), "there": str(there), "folder": str(tmp_path)}
    assert run(escape.format(**names), QUICK).status == FAILED
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert there.read_text() == "kept"
    assert os.access(there, os.R_OK)


LAYER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pipeline.quality import child
os.chdir(sys.argv[2])
assert child.{layer}
try:
    {attempt}
except (OSError, ValueError):  # setrlimit raises the latter
    os._exit(7)
os._exit(0)
"""


def alone(layer: str, attempt: str, folder: Path) -> int:
    """Exit status of an attempt under one layer only: 7 where the system refused it."""
    program = LAYER.format(layer=layer, attempt=attempt)
    root = Path(child.__file__).parents[2]
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", program, str(root), str(folder)], check=False, timeout=30
    ).returncode


@pytest.mark.skipif("folder" not in layers(), reason="this system has no Landlock")
def test_the_system_itself_keeps_writing_in_the_folder(tmp_path):
    layer, outside = "restrict_writing(sys.argv[2])", tmp_path / "outside"
    assert alone(layer, "open('inside', 'w').write('x'); os.remove('inside')", tmp_path / "in") == 0
    for attempt in (f"open({str(outside)!r}, 'w')", f"os.mkdir({str(outside)!r})"):
        assert alone(layer, attempt, tmp_path / "in") == 7
    assert not outside.exists()


@pytest.mark.skipif("calls" not in layers(), reason="this system has no seccomp filter")
def test_the_system_itself_refuses_processes_sockets_and_signals(tmp_path):
    for attempt in (
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "import socket; socket.socket()",
        "os.kill(os.getppid(), 0)",
        "os.chmod('.', 0o755)",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))",
    ):
        assert alone("filter_calls()", attempt, tmp_path) == 7, attempt
    assert alone("filter_calls()", "os.getpid(); open('fine', 'w')", tmp_path) == 0


def test_layers_are_known_by_name():
    assert set(layers()) <= set(LAYERS)
    assert "limits" in layers()


# --------------------------------------------------------------------------------------- extraction

PROMPT = 'import math\n\ndef helper(x):\n    return x + 1\n\ndef area(r):\n    """Area."""\n'
BODY = "    return math.pi * helper(r - 1) ** 2"
WHOLE = f'def area(r):\n    """Area."""\n{BODY}'
PROBLEM = Problem(PROMPT, "area", "def check(f):\n    assert 3.1 < f(1) < 3.2\ncheck(area)", "")


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{WHOLE}\n```",
        f"Sure!\n\n```py\n{WHOLE}\n```\nIt uses `math`.\n```\narea(2)\n```",
        f"```\n{PROMPT}{BODY}\n```",
        f"First a test:\n```python\nprint(area(1))\n```\nthen\n```python\n{WHOLE}\n```",
        f"```python\n{WHOLE}\n",  # cut short, or never closed
        f"```python\r\n{WHOLE}\r\n```".replace("\n", "\r\n").replace("\r\r", "\r"),
        WHOLE,
        f"Here it is:\n\n{WHOLE}\n\nThis computes the area, doesn't it?",
        BODY,
        BODY.strip(),
        f"```python\n{BODY}\n```",
        f"{BODY}\n\nThat's all.",
        f"  ```python\n{WHOLE}\n  ```",
        f"```python\n{WHOLE}\n\nprint(area(1)\n```",  # the line that is broken comes later
    ],
)
def test_code_is_found_and_passes(answer):
    assert [outcome.status for outcome in grade([(PROBLEM, answer)], QUICK)] == [PASSED]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (WHOLE.replace("math.pi", "3 + math.pi"), FAILED),
        ("```python\ndef area(r):\n    return undefined\n```", FAILED),
        ("I cannot do that.", ERROR),
        ("", ERROR),
        ("```python\n```", ERROR),
        ('```python\ndef area(r):\n    """Only words."""\n```', FAILED),
        ("```python\ndef volume(r):\n    return 1\n```", ERROR),
    ],
)
def test_wrong_code_does_not_pass(answer, status):
    assert [outcome.status for outcome in grade([(PROBLEM, answer)], QUICK)] == [status]


def test_the_pieces_of_extraction():
    assert blocks("```a\nx\n```\ntext\n```\ny\n```") == ["x\n", "y\n"]
    assert script("```python\ndef f(x):\n    return x\n```", {"f"}).strip().endswith("return x")
    assert script("def g(x):\n    return x", {"f"}) is None
    assert function_program("def f(:\n", "def f():\n", "f") is None


def test_rows_say_how_they_are_graded():
    row = {"test": "def check(f):\n    assert f(2) == 4", "entry_point": "twice"}
    problem = Problem.of(row, 'def twice(x):\n    """Twice."""\n')
    right, wrong = "    return 2 * x", "    return 3 * x"
    found = grade([(problem, right), (problem, wrong), (problem, right)], QUICK)
    assert [outcome.status for outcome in found] == [PASSED, FAILED, PASSED]
    listed = Problem.of({"test_list": ["assert f(1) == 2"], "test_setup_code": "y = 1"}, "p")
    answers = ["```python\ndef f(x):\n    return x + y\n```", "def f(x):\n    return x"]
    assert [o.status for o in grade([(listed, a) for a in answers], QUICK)] == [PASSED, FAILED]
    assert Problem.of({"prompt": "hello"}, "hello") is None
    assert Problem.of({"answer": 18}, "p").answer == "18"


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so 3 and then 4.", "4"),
        ("#### 1,234", "1,234"),
        ("The answer is 5. I checked 6 times.", "5"),
        ("Answer: **$18.50**", "18.50"),
        ("first \\boxed{1}, no: \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed 7.", "7"),
        ("The answer is 5, so \\boxed{6}", "6"),
        ("The answer is yes.", "yes"),
        ("none at all", None),
        ("", None),
        ("\\boxed{cut", None),
        ("minus -3 degrees", "-3"),
    ],
)
def test_the_final_answer_is_found(text, found):
    assert final_answer(text) == found


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("18", "18.00", True),
        ("$1,000", "1000", True),
        ("18 eggs", "18", True),
        ("50%", "50", True),
        ("1/2", "0.5", True),
        ("\\frac{1}{2}", "0.5", True),
        ("\\dfrac12", "\\frac{1}{2}", True),
        ("-\\frac{3}{4}", "-0.75", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
        ("x = 5", "5", True),
        ("90^\\circ", "90", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("18", "19", False),
        ("1.8", "18", False),
        ("2\\sqrt{2}", "\\sqrt{8}", False),
        ("1/0", "0", False),
        ("(1, 2)", "(2, 1)", False),
        ("-5", "5", False),
        ("9" * 5000, "8" * 5000, False),
    ],
)
def test_answers_are_compared_as_said(one, other, equal):
    assert same(one, other) is same(other, one) is equal


def test_no_answer_is_not_right():
    assert not is_right("I do not know", "5")
    assert is_right("She has 3 + 2 = 5 apples.", "5")
    assert json.dumps([o.status for o in grade([(Problem("", "", "", "5"), "4")], QUICK)]) == (
        '["failed"]'
    )
