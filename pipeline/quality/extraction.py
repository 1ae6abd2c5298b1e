"""The program in a chat answer: what stands in its fences, or what completes the prompt."""

import ast
import re
from collections.abc import Collection

FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def function_program(answer: str, prompt: str, entry_point: str) -> str | None:
    """A program that defines `entry_point`, for a prompt that is the beginning of that function.

    In order: the fenced block that defines it; a block, or the whole answer, that defines it
    further down or goes on where the prompt ends. What stands before the function in the prompt
    (imports, helpers) comes first. None: the answer has no such code.
    """
    before = prompt.partition(f"def {entry_point}(")[0]
    for text in [*blocks(answer), answer]:
        if (code := definition(text, {entry_point})) is not None:
            return f"{before}\n{code}"
    for text in [*blocks(answer), answer]:
        if (code := completion(prompt, text, entry_point)) is not None:
            return code
    return None


def script(answer: str, names: Collection[str]) -> str | None:
    """The part of the answer that defines one of the functions that its tests call."""
    for text in [*blocks(answer), answer]:
        if (code := definition(text, names)) is not None:
            return code
    return None


def blocks(answer: str) -> list[str]:
    """What stands in fences, in order; the last may lack its end."""
    return FENCE.findall(answer.replace("\r\n", "\n"))


def definition(text: str, names: Collection[str]) -> str | None:
    """The longest run of lines that is Python and defines one of `names` at its top level."""
    lines = text.replace("\r\n", "\n").split("\n")
    starts = [
        n for n, line in enumerate(lines) if re.match(r"(import|from|def|class|@|\w+ =)", line)
    ]
    defining = {n for n in starts for name in names if re.match(rf"def {name}\b", lines[n])}
    if not defining:
        return None
    for start in starts:
        if start <= max(defining):
            code = longest("\n".join(lines[start:]))
            if code is not None and defines(code, names):
                return code
    return None


def completion(prompt: str, text: str, entry_point: str) -> str | None:
    """The prompt with the text after it, up to where it stops being Python."""
    if not text.strip():
        return None
    body = text.lstrip("\n").rstrip()
    if not body.startswith((" ", "\t")):  # a chat template takes the first indent away
        body = f"    {body}"
    code = longest(f"{prompt.rstrip()}\n{body}")
    if code is None or len(code) <= len(prompt.rstrip()) + 1:
        return None
    return code if defines(code, {entry_point}) and has_body(code, entry_point) else None


def longest(text: str) -> str | None:
    """The most first lines of a text that are Python; None where not even one is."""
    lines = text.split("\n")
    while lines:
        code = "\n".join(lines)
        try:
            ast.parse(code)
        except SyntaxError as error:
            # what comes after the line of an error cannot mend it
            lines = lines[: min(len(lines) - 1, error.lineno or len(lines))]
        except (ValueError, RecursionError, MemoryError):  # null bytes, or nested too deep
            return None
        else:
            return code if code.strip() else None
    return None


def defines(code: str, names: Collection[str]) -> bool:
    """Whether a function of one of these names is defined at the top level."""
    return any(function.name in names for function in functions(code))


def has_body(code: str, name: str) -> bool:
    """Whether the function does more than hold its docstring."""
    bodies = [function.body for function in functions(code) if function.name == name]
    return any(len(body) > 1 or not isinstance(body[0], ast.Expr) for body in bodies)


def functions(code: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Those of the top level."""
    found = ast.parse(code).body
    return [node for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
