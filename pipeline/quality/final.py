"""Final answers of word problems, found in a text and compared.

Found: what the last \\boxed{} holds; else what follows the last ####; else what follows the last
"answer is" (or "answer:"), the line's first number or its formula; else the text's last number.

Compared: as exact fractions where both sides are numbers - after taking away currency signs,
thousands commas, percent and degree signs, a unit behind the number, a final full stop - so that
18, $18.00, 18 eggs and 36/2 are one; else as text without spaces and typesetting (\\left, \\right,
\\!, \\text{} around words, dfrac and tfrac as frac, \\frac12 as \\frac{1}{2}). Nothing is computed:
2\\sqrt{2} and \\sqrt{8} differ.
"""

import re
from fractions import Fraction

NUMBER = r"[-+]?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?|[-+]?\$?\.\d+"
SAID = re.compile(r"answer(?:\s+is)?\s*[:=]?\s*(?:\*\*|\$|\s)*", re.IGNORECASE)
DROPPED = re.compile(
    r"\\(?:left|right|!|,|;|:|quad|%|\$|mathrm|displaystyle)|[\s$%]|\^\{?\\circ\}?"
)
MOST_DIGITS = 40  # a longer number is compared as text


def is_right(text: str, wanted: str) -> bool:
    """Whether the text's final answer is the wanted one."""
    found = final_answer(text)
    return found is not None and same(found, wanted)


def final_answer(text: str) -> str | None:
    """The final answer as it stands in the text; None where there is none."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip() or None
    for match in reversed([*SAID.finditer(text)]):
        line = text[match.end() :].partition("\n")[0]
        if number := re.search(NUMBER, line):
            return number[0]
        if line.strip(" .*$"):
            return line.strip(" .*$")
    numbers = re.findall(NUMBER, text)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, braces balanced."""
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    rest = text[start + len("\\boxed") :].lstrip()
    if not rest.startswith("{"):
        return rest.split()[0].rstrip("$.") if rest.split() else None
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:place].strip()
    return None  # cut short


def same(one: str, other: str) -> bool:
    """Whether two answers are equal, as the module says."""
    left, right = number_of(one), number_of(other)
    if left is not None and right is not None:
        return left == right
    return plain(one) == plain(other)


def number_of(text: str) -> Fraction | None:
    """The value of an answer that is one number, with or without a unit."""
    bare = plain(text).replace(",", "")
    bare = re.sub(r"^(-?)\\frac\{(-?\d+)\}\{(\d+)\}$", r"\1\2/\3", bare)
    match = re.fullmatch(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?)(?:[a-zA-Z].*)?", bare)
    if match is None or len(match[1]) > MOST_DIGITS:
        return None
    top, _, bottom = match[1].partition("/")
    if bottom and int(bottom) == 0:
        return None
    return Fraction(top) / int(bottom or 1)


def plain(text: str) -> str:
    """An answer without what is only typesetting."""
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}", r"\1", text)
    text = DROPPED.sub("", text).rstrip(".")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    return re.sub(r"^[a-zA-Z]=", "", text)  # x = 5
