"""What a benchmark asks of an answer, and whether it is given."""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.quality.extraction import function_program, script
from pipeline.quality.final import is_right
from pipeline.quality.sandbox import ERROR, FAILED, PASSED, Limits, Outcome, run_programs

Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt that can be graded: by the tests of a function, or by its final answer."""

    prompt: str
    entry_point: str  # the function to write; "": whichever the tests call
    tests: str  # Python; "": it is graded by `answer`
    answer: str

    @classmethod
    def of(cls, raw: Mapping[str, Any], prompt: str) -> "Problem | None":
        """What a benchmark's row asks for; None where it holds nothing to grade by."""
        entry, test, tests = raw.get("entry_point"), raw.get("test"), raw.get("test_list")
        if isinstance(entry, str) and isinstance(test, str):
            return cls(prompt, entry, f"{test}\ncheck({entry})", "")
        if isinstance(tests, Sequence) and not isinstance(tests, str) and tests:
            setup = raw.get("test_setup_code") or ""
            return cls(prompt, "", "\n".join([str(setup), *map(str, tests)]), "")
        answer = raw.get("answer")
        return cls(prompt, "", "", str(answer)) if answer not in (None, "") else None

    def program(self, answer: str) -> str | None:
        """The answer's code followed by the tests; None where it has none."""
        if self.entry_point:
            code = function_program(answer, self.prompt, self.entry_point)
        else:
            code = script(answer, called(self.tests))
        return None if code is None else f"{code}\n\n{self.tests}\n"


def grade(
    pairs: Iterable[tuple[Problem, str]], limits: Limits, advance: Advance = lambda: None
) -> list[Outcome]:
    """How each answer fares; equal answers to one problem are run once."""
    asked = list(pairs)
    found: dict[tuple[Problem, str], Outcome] = {}
    programs: dict[tuple[Problem, str], str] = {}
    for pair in dict.fromkeys(asked):
        problem, answer = pair
        if not problem.tests:
            right = is_right(answer, problem.answer)
            found[pair] = Outcome(PASSED if right else FAILED)
        elif (program := problem.program(answer)) is None:
            found[pair] = Outcome(ERROR, "no code in the answer")
        else:
            programs[pair] = program
    for pair, outcome in zip(programs, run_programs([*programs.values()], limits), strict=True):
        found[pair] = outcome
        advance()
    return [found[pair] for pair in asked]


def called(tests: str) -> set[str]:
    """Names of the functions that tests call."""
    try:
        tree = ast.parse(tests)
    except SyntaxError:
        return set()
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {func.id for func in calls if isinstance(func, ast.Name)}
