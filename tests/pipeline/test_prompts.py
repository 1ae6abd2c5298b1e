"""The embedded prompts are whole, distinct, in range and leak-free.

Bugs these tests would catch: a slot that is never filled or left as braces; a bare number or clock
time that YAML turned into something else; two families that share a long passage, so that a test
prompt was half seen in training; a duplicate that differs in case or spacing only; a "paraphrase"
that is the template again; a code block that lost its indentation in a block scalar; an expansion
that changes from run to run.

The bounds are the data's contract, not measurements: 40-700 characters keeps a prompt under some
two hundred tokens, so that the answer and not the prefill is what a small run spends its time on;
a run of thirteen words is too long to be shared by chance.
"""

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from itertools import combinations

import pytest

from pipeline.prompts import (
    DOMAINS,
    MIXED,
    Expansion,
    Family,
    expand,
    load_families,
    parse_families,
    placeholders,
)

ALL = (*DOMAINS, MIXED)
LENGTH = range(40, 701)
LEAK_WORDS = 13
MAX_OVERLAP = 0.5  # Jaccard of the words a wording adds around its slots; a copy scores 1
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def texts(expansion: Expansion) -> tuple[str, ...]:
    return (expansion.text, *expansion.paraphrases)


EXPANDED: list[tuple[Family, list[Expansion]]] = [
    (family, expand(family, seed=0)) for domain in ALL for family in load_families(domain)
]
EVERY_TEXT = [(family, text) for family, rows in EXPANDED for row in rows for text in texts(row)]


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_domain_has_enough_families_and_prompts(domain):
    families = load_families(domain)
    assert len(families) >= 32
    assert all(len(family.fillings) >= 8 for family in families)
    assert sum(len(family.fillings) for family in families) >= 250


def test_mixed_prompts_name_the_two_domains_they_move_between():
    families = load_families(MIXED)
    assert len(families) >= 24
    for family in families:
        assert len(family.fillings) >= 3, family.name
        assert len(family.domains) == 2, family.name
        assert set(family.domains) <= set(DOMAINS), family.name
        assert family.domains[0] != family.domains[1], family.name
    pairs = Counter(family.domains for family in families)
    assert len(pairs) == 6, "every order of two domains occurs"


def test_family_names_are_unique_slugs_across_all_files():
    names = [family.name for family, _ in EXPANDED]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name) for name in names)
    assert all(family.name.startswith(f"{family.domain}-") for family, _ in EXPANDED)


def test_every_placeholder_is_filled_and_prose_has_no_brace_left():
    left = [text for _, text in EVERY_TEXT if "{{" in text or re.search(r"\w}}", text)]
    assert left == []
    prose = [re.sub(r"`[^`]*`", "", FENCE.sub("", text)) for _, text in EVERY_TEXT]
    assert [text for text in prose if "{" in text or "}" in text] == []


def test_lengths_are_in_range():
    odd = [(f.name, len(text)) for f, text in EVERY_TEXT if len(text) not in LENGTH]
    assert odd == []


def test_no_two_prompts_are_the_same_after_folding_case_and_space():
    seen = Counter(" ".join(text.split()).casefold() for _, text in EVERY_TEXT)
    assert [text for text, count in seen.items() if count > 1] == []


def shared_runs(named_texts: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return (family, other family, run) for every long run of words that two families share."""
    owner: dict[tuple[str, ...], str] = {}
    shared = set()
    for name, text in named_texts:
        tokens = words(text)
        for start in range(len(tokens) - LEAK_WORDS + 1):
            run = tuple(tokens[start : start + LEAK_WORDS])
            if owner.setdefault(run, name) != name:
                shared.add((owner[run], name, " ".join(run)))
    return sorted(shared)


def test_no_run_of_thirteen_words_is_shared_between_families():
    assert shared_runs((family.name, text) for family, text in EVERY_TEXT) == []


def test_the_leak_check_sees_a_planted_leak_in_other_case_and_spacing():
    family, text = next((f, t) for f, t in EVERY_TEXT if len(words(t)) > LEAK_WORDS)
    planted = "Before. " + text.upper().replace(" ", "  ")
    leaks = shared_runs([(family.name, text), ("other", planted)])
    assert len(leaks) == len(words(text)) - LEAK_WORDS + 1
    barely = " ".join(words(text)[: LEAK_WORDS - 1])
    assert shared_runs([(family.name, text), ("other", barely)]) == []


def test_paraphrases_use_other_words_around_the_same_slots():
    for family, _ in EXPANDED:
        wordings = (family.template, *family.paraphrases)
        assert len(wordings) == 3, family.name
        assert len({frozenset(placeholders(wording)) for wording in wordings}) == 1, family.name
        for one, other in combinations(wordings, 2):
            left, right = (set(words(re.sub(r"\{\{\w+\}\}", " ", w))) for w in (one, other))
            overlap = len(left & right) / len(left | right)
            assert overlap < MAX_OVERLAP, (family.name, overlap)


def test_code_fences_are_balanced():
    for family, text in EVERY_TEXT:
        marks = [line for line in text.splitlines() if line.startswith("```")]
        assert text.count("```") == len(marks), (family.name, "a fence stands alone on its line")
        assert len(marks) == 2 * len(FENCE.findall(text)), family.name


def test_python_blocks_compile_unless_the_family_is_about_broken_code():
    compiled = 0
    for family, text in EVERY_TEXT:
        for language, code in FENCE.findall(text):
            if language != "python":
                continue
            if family.broken:
                with pytest.raises(SyntaxError):
                    ast.parse(code)
            else:
                ast.parse(code)
            compiled += 1
    assert compiled > 100


def test_many_code_families_give_code_to_work_on():
    with_code = [family for family in load_families("code") if "```" in family.template]
    assert len(with_code) >= 12


def test_prose_has_no_stray_spacing_and_starts_as_a_sentence():
    for family, text in EVERY_TEXT:
        prose = FENCE.sub("", text)
        assert "  " not in prose.replace("\n", " \n").replace(" \n", "\n"), family.name
        assert not re.search(r"\s[,.;?!](\s|$)|\.\.(\s|$)|,\.", prose), (family.name, text)
        assert not text[0].islower(), (family.name, text)


def test_expansion_is_deterministic_and_a_smaller_limit_is_a_prefix():
    family = load_families("code")[0]
    whole = expand(family, seed=7)
    assert expand(family, seed=7) == whole
    assert expand(family, seed=7, limit=3) == whole[:3]
    assert expand(family, seed=8) != whole
    assert sorted(expand(family, seed=8)) == sorted(whole)
    assert expand(family, seed=7, limit=0) == []


GOOD = """
- family: code-demo
  template: |
    At {{when}} run {{code}} with {"a": 1}.
  paraphrases: ["{{code}} at {{when}}", "{{when}}: {{code}}"]
  cases:
    - when: 9:30
      code: |
        if x:
            y()
    - when: 1.10
      code: no
"""


def test_values_stay_the_text_that_was_written():
    (family,) = parse_families(GOOD, "code")
    by_file_order = [filling["when"] for filling in family.fillings]
    assert by_file_order == ["9:30", "1.10"]
    rows = {row.text for row in expand(family, seed=0)}
    assert rows == {
        'At 9:30 run if x:\n    y() with {"a": 1}.',
        'At 1.10 run no with {"a": 1}.',
    }


def test_cases_meet_every_combination_of_slots():
    source = textwrap.dedent(
        """
        - family: chat-demo
          template: "{{a}}{{b}}{{c}}{{d}}"
          paraphrases: ["{{d}}{{c}}{{b}}{{a}}", "{{a}} {{b}} {{c}} {{d}}"]
          cases: [{a: 1, b: 2}, {a: 3, b: 4}]
          slots: {c: [x, y, z], d: [p, q]}
        """
    )
    (family,) = parse_families(source, "chat")
    assert len(family.fillings) == 12
    assert {row.text[:2] for row in expand(family, seed=0)} == {"12", "34"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{{when}}: {{code}}", "{{code}}", "disagree on \\['when'\\]"),
        ("{{when}}: {{code}}", "{{whem}}: {{code}}", "disagree on"),
        ("- when: 1.10", "- whn: 1.10", "disagree on"),
        ("  cases:", "  case:", "unknown keys \\['case'\\]"),
        ("  paraphrases: [", "  other: [", "unknown keys"),
        ("- family: code-demo", "- domains: [code, chat]\n  family: code-demo", "mixed"),
    ],
)
def test_a_wrong_family_is_named(old, new, message):
    assert old in GOOD
    with pytest.raises(ValueError, match=message):
        parse_families(GOOD.replace(old, new), "code")


def test_a_repeated_family_name_is_refused():
    with pytest.raises(ValueError, match="unique"):
        parse_families(GOOD + GOOD, "code")


def test_an_unknown_domain_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'poetry'.*code, chat, reasoning, mixed"):
        load_families("poetry")
