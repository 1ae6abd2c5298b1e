"""What must not be learned from is refused by name, what is odd is counted, what is well passes.

Would catch: a mask that is empty or covers the prompt; another chat template, tokenizer or target
than the answers were given under; a template that loses text or has no generation prompt; a prompt
that begins twice; ends that are not where the record says; ids that the target has no column for,
or no token; a loop that is not seen, or a list that is taken for one; a count that mixes up laws,
domains or rows; rows held back in silence, or a warning that is said for every drafter.

Counts are exact. Every refusal is planted in one row of many, and the rows without it pass.
"""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_regenerate import stage as regenerate_stage
from test_train_drafter import World, distill, finetune, train, world  # noqa: F401
from tiny import EOS, TEMPLATE, VOCAB_SIZE, tiny_model, tiny_target_folder, tiny_tokenizer
from workspace import RUNTIME, prompt, tiny_config, workspace, write_prompts

from decode.targets.transformers import TransformersTarget
from decode.types import Sampling
from pipeline.answers import Answer, Answers, AnswerWriter
from pipeline.chat import prompt_ids
from pipeline.lint import MOST_ASKED, Linter, foreign_share, lint_answers, lint_prompts
from pipeline.lint_report import LintReport, read_lint, remarks
from pipeline.lint_sources import prompts_behind
from pipeline.manifest import read_manifest
from pipeline.prepare import Prepare
from pipeline.row_lint import loops
from pipeline.stage import Pipeline
from pipeline.training_data import Rows, TextExample

BOS = 1
PROMPTS = {f"{d}-{n}": prompt(n, d, words=2 + n) for n in range(6) for d in ("code", "chat")}
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return TransformersTarget(tiny_model(), tiny_tokenizer(), "tiny")


def answer(name: str, number: int = 0, **changes: Any) -> Answer:
    """Clean: the prompt as the template writes it, 20 tokens that differ, and an end."""
    before = prompt_ids(TOKENIZER, PROMPTS[name])
    text = [5 + (number * 11 + place * 7) % 92 for place in range(20)]
    fields: dict[str, Any] = {
        "id": name,
        "split": "drafter_train",
        "domain": PROMPTS[name]["domain"],
        "family": "f",
        "text": PROMPTS[name]["text"],
        "law": "greedy",
        "sampling": Sampling(),
        "token_ids": torch.tensor([*before, *text, EOS]),
        "num_prompt_tokens": len(before),
        "logprobs": torch.zeros(21),
        "lse": torch.zeros(21),
        "topk_ids": torch.zeros(21, 0, dtype=torch.long),
        "topk_logits": torch.zeros(21, 0),
        "finish_reason": "eos",
    }
    return Answer(**{**fields, **changes})


CLEAN = [answer(name, number) for number, name in enumerate(PROMPTS)]


def lint(target: TransformersTarget, *rows: Any, **settings: Any) -> LintReport:
    return lint_answers([*CLEAN, *rows], target, **{"prompts": PROMPTS, **settings})


def said(row: Answer, *token_ids: int, reason: str = "length") -> Answer:
    """The row with another answer."""
    ids = torch.tensor([*row.token_ids[: row.num_prompt_tokens].tolist(), *token_ids])
    return dataclasses.replace(row, token_ids=ids, finish_reason=reason)


def asked(row: Answer, *token_ids: int) -> Answer:
    """The row with another prompt."""
    ids = torch.tensor([*token_ids, *row.answer_ids.tolist()])
    return dataclasses.replace(row, token_ids=ids, num_prompt_tokens=len(token_ids))


def test_clean_answers_pass_without_a_word(target, caplog):
    caplog.set_level(logging.INFO)
    report = lint(target)
    assert report.warnings == []
    assert report.metrics["lint_rows"] == 12
    assert report.metrics["lint_tokens"] == 12 * 21
    assert report.metrics["lint_prompts_rendered"] == 12
    assert report.metrics["lint_num_warnings"] == 0
    shares = {name: v for name, v in report.metrics.items() if name.endswith("_share")}
    assert set(shares.values()) == {0.0}, shares
    report.tell()
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 3
    json.dumps(report.metrics)


FIRST = CLEAN[0]
BEFORE = FIRST.token_ids[: FIRST.num_prompt_tokens].tolist()
REFUSED: dict[str, tuple[Answer, str]] = {
    "nothing learned": (
        dataclasses.replace(FIRST, num_prompt_tokens=len(FIRST.token_ids)),
        r"has nothing to learn: all of its \d+ tokens are counted as prompt; run stage=regen",
    ),
    "prompt learned": (
        dataclasses.replace(FIRST, num_prompt_tokens=0),
        "would be learned as a whole: none of its .* run stage=regenerate force=true",
    ),
    "no column": (said(FIRST, 7, VOCAB_SIZE), "holds token id 97, which is outside .* 0..96;"),
    "negative": (said(FIRST, 7, -100), "holds token id -100, which is outside the target's"),
    "begins twice": (asked(FIRST, BOS, BOS, 9), "begins with <s> twice: the chat template and"),
    "goes on": (said(FIRST, 7, EOS, 8), "goes on after '</s>', .* at its answer's token 1:"),
    "no end": (said(FIRST, 7, 8, reason="eos"), "is said to have ended .* token 'w3' ends no"),
    "other prompt": (
        asked(FIRST, *BEFORE[:1], 96, *BEFORE[2:]),
        "^prompt code-0 was answered under another chat template or tokenizer: its token 1 was "
        "'w91', and today's template gives 'w0'; run stage=regenerate",
    ),
    "longer prompt": (asked(FIRST, *BEFORE, 9), "token 5 was 'w4', and .* gives its end"),
    "shorter prompt": (asked(FIRST, *BEFORE[:-1]), r"was its end, and .* gives '<\|assistant\|>'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_must_not_be_learned_from_is_named(target, name):
    row, words = REFUSED[name]
    others = [other for other in CLEAN if other.id != row.id]
    with pytest.raises(ValueError, match=words) as caught:
        lint_answers([*others, row], target, prompts=PROMPTS)
    assert "code-0" in str(caught.value)
    assert ";" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert lint_answers(others, target, prompts=PROMPTS).metrics["lint_rows"] == 11


def test_an_empty_prompt_may_be_learned_from_as_a_whole(target):
    row = dataclasses.replace(FIRST, num_prompt_tokens=0, text="", id="not among the prompts")
    assert lint(target, said(row, 9, 8)).metrics["lint_rows"] == 13


def test_rows_without_a_name_are_numbered(target):
    rows = [TextExample(torch.tensor([5, 6, 7]), n, Sampling()) for n in (1, 2, 3)]
    with pytest.raises(ValueError, match=r"^row 3 of the text to learn has nothing to learn"):
        lint_answers(rows, target)
    assert lint_answers(rows[:2], target).metrics["lint_learned_share_median"] == 0.5
    # What is gathered for training may be linted too.
    assert lint_answers(Rows(rows[:2], 9), target).metrics["lint_tokens"] == 3


def test_no_rows_are_no_mistake(target):
    report = lint_answers([], target)
    assert report.lines == ["lint: no rows"]
    assert report.warnings == []


def with_padding(columns: int) -> TransformersTarget:
    """A target whose logits have more columns than its tokenizer has tokens."""
    model = tiny_model()
    model.resize_token_embeddings(VOCAB_SIZE + columns)
    return TransformersTarget(model, tiny_tokenizer(), "padded")


def test_padding_columns_are_refused_in_prompts_and_counted_in_answers():
    padded = with_padding(31)
    with pytest.raises(ValueError, match=r"token id 97 in its prompt, a padding column .* at 96;"):
        lint(padded, asked(FIRST, 5, VOCAB_SIZE))
    report = lint(padded, said(FIRST, 5, VOCAB_SIZE, 127, 6))
    assert report.metrics["lint_padding_share"] == 2 / (12 * 21 + 4)
    assert (report.metrics["lint_columns"], report.metrics["lint_real_ids"]) == (128, 97)
    assert any("are padding columns of the target's logits" in text for text in report.warnings)
    assert lint(padded).warnings == []


def drafter(*ids: int) -> Any:
    return SimpleNamespace(vocab_size=VOCAB_SIZE, draft_ids=torch.tensor(ids) if ids else None)


def test_answers_outside_the_draft_vocabulary_are_counted_by_domain(target):
    """All ids but two; one of them stands in two answers of chat, the other in none."""
    counts = {d: torch.zeros(VOCAB_SIZE, dtype=torch.long) for d in ("code", "chat")}
    for row in CLEAN:
        counts[row.domain] += torch.bincount(row.answer_ids, minlength=VOCAB_SIZE)
    missing = int(counts["chat"].argmax())
    kept = drafter(*(token for token in range(VOCAB_SIZE) if token != missing))
    metrics = lint(target, drafter=kept).metrics
    wanted = {d: float(counts[d][missing]) for d in counts}
    assert metrics["lint_outside_share"] == sum(wanted.values()) / (12 * 21)
    for domain, count in wanted.items():
        assert metrics[f"lint_outside_share_{domain}"] == count / (6 * 21)
    few = lint(target, drafter=drafter(*range(50)))
    assert any("outside the draft vocabulary, and each of them" in text for text in few.warnings)
    assert few.lines[-1].endswith("%")
    assert lint(target, drafter=drafter()).metrics["lint_outside_share"] == 0
    assert "lint_outside_share" not in lint(target).metrics


CYCLE = [5, 9, 13, 6, 30]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (list(range(5, 69)), False),
        (CYCLE * 20, True),
        ([7] * 40, True),
        (CYCLE * 6, False),  # 30 tokens are too few to say
        ([*range(5, 45), *CYCLE * 13], True),  # only its end loops
        ([*CYCLE * 13, *range(5, 69)], False),  # it has found its way out
        ([*range(5, 37), *range(5, 37)], False),  # said twice is no loop
    ],
)
def test_a_loop_is_seen_in_the_last_part_only(text, found):
    assert loops(np.array(text)) is found


def test_loops_are_counted_and_left_out_where_asked(target):
    looping = [said(row, *CYCLE * 9) for row in CLEAN[:3]]
    report = lint_answers([*CLEAN[3:], *looping], target)
    assert report.metrics["lint_loop_share"] == 3 / 12
    assert report.metrics["lint_loops_dropped"] == 0
    assert any(text.startswith("25% of the answers end in a loop") for text in report.warnings)
    assert any("drop_loops=true" in text for text in report.warnings)
    linter = Linter(target, drop_loops=True)
    assert list(linter.passing([*looping, *CLEAN[3:]])) == CLEAN[3:]
    assert linter.report().metrics["lint_loops_dropped"] == 3
    assert list(Linter(target).passing([*looping, *CLEAN[3:]])) == [*looping, *CLEAN[3:]]


def test_short_cut_empty_and_repeated_answers_are_counted(target):
    rows = [
        said(CLEAN[0], EOS, reason="eos"),  # empty
        said(CLEAN[1], 9, 8, 7),  # cut
        said(CLEAN[2], 9, 8, 7),  # cut, and said by another prompt already
        dataclasses.replace(said(CLEAN[3], 9, 8, 7), law="sampled"),  # under another law
        dataclasses.replace(said(CLEAN[1], 9, 8, 7), law="sampled"),  # again, not its first
        said(CLEAN[1], 9, 8, 7),  # the same prompt again
    ]
    metrics = lint_answers(rows, target).metrics
    assert metrics["lint_empty_share"] == 1 / 6
    assert metrics["lint_cut_share"] == 5 / 6
    assert metrics["lint_duplicate_share"] == 2 / 6
    texts = lint_answers(rows, target).warnings
    assert [next(word for word in ("word for word", "empty") if word in t) for t in texts] == [
        "word for word",
        "empty",
    ]


def test_prompts_that_leave_no_room_are_counted_as_training_leaves_them_out(target):
    """Against Rows, which cuts: prompts have 5 to 10 tokens."""
    for max_tokens in (4, 5, 7, 10, 11, 40):
        left_out = len(CLEAN) - len(Rows(CLEAN, max_tokens))
        report = lint(target, max_tokens=max_tokens)
        assert report.metrics["lint_too_long_share"] * len(CLEAN) == pytest.approx(left_out)
        assert bool(report.warnings) == bool(left_out)


def test_the_spread_of_what_is_learned(target):
    rows = [asked(FIRST, *[5] * n) for n in (21, 63, 7)]
    metrics = lint_answers(rows, target).metrics
    assert metrics["lint_learned_share_median"] == 0.5
    assert metrics["lint_learned_share_p5"] == pytest.approx(0.25 + 0.1 * 0.25)
    assert metrics["lint_prompt_tokens_median"] == 21
    assert metrics["lint_answer_tokens_p95"] == 21


# ------------------------------------------------------------------------------------- templates


def rendered(template: str, *messages: dict[str, str]) -> Callable[[], None]:
    """Checks prompts under another template, as stage=regenerate does before it begins."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    turns = messages or ({"role": "user", "content": "w1 w2"},)
    row = {"id": "p", "text": "w1 w2", "messages_json": json.dumps(turns)}
    return lambda: lint_prompts([(row, prompt_ids(tokenizer, row))], tokenizer)


SYSTEM = {"role": "system", "content": "w7 w8"}
USER = {"role": "user", "content": " w1 w2\n"}
ASSISTANT = {"role": "assistant", "content": "w3"}
NO_PROMPT = TEMPLATE.replace("add_generation_prompt", "false")
EVERY = "in messages %}"
USERS_ONLY = TEMPLATE.replace(EVERY, "in messages if message['role'] == 'user' %}")
LAST_ONLY = TEMPLATE.replace(EVERY, "in messages[-1:] %}")
UNANSWERED = TEMPLATE.replace(EVERY, "in messages | rejectattr('role', 'equalto', 'assistant') %}")
CLOSED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|> {{ m['content'] }} </s>"
    "{% else %} {{ m['content'] }}{% endif %}{% endfor %}"
)
CONTENT = "{{ message['content'] }}"
THINKS = TEMPLATE.replace(
    CONTENT, "{% if message['role'] == 'assistant' %}w90 w91 {% endif %}" + CONTENT
)


def test_templates_that_lose_nothing_pass():
    rendered(TEMPLATE)()
    rendered(TEMPLATE, SYSTEM, USER, ASSISTANT, USER)()
    rendered(TEMPLATE.replace("message['content']", "message['content'] | trim"), SYSTEM, USER)()
    rendered(CLOSED)()  # a closing tag is all there is before an answer
    rendered(THINKS)()  # what a model writes before its answer is its own affair
    rendered(UNANSWERED, USER, ASSISTANT, USER)()  # may forget what the assistant said


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (rendered(USERS_ONLY, SYSTEM, USER), "drops the system text of prompt p, .*; mend chat_t"),
        (rendered(LAST_ONLY, {**USER, "content": "w9"}, ASSISTANT, USER), "drops the user text"),
        (rendered("w1 {% if add_generation_prompt %}w2{% endif %} w4 w1 w2", SYSTEM), "drops the"),
        (rendered(NO_PROMPT), r"ignores add_generation_prompt, .* header '<\|assistant\|>' itself"),
    ],
)
def test_templates_that_lose_text_are_refused(check, words):
    with pytest.raises(ValueError, match=words):
        check()


def test_a_prompt_that_begins_twice_is_refused_before_it_is_answered():
    with pytest.raises(ValueError, match=r"^prompt p begins with <s> twice"):
        rendered("<s> <s> " + TEMPLATE)()
    rendered("<s> " + TEMPLATE)()


def test_another_template_than_the_answers_were_given_under_is_refused(target):
    other = TransformersTarget(tiny_model(), tiny_tokenizer(), "tiny")
    other.tokenizer.chat_template = TEMPLATE.replace("<|assistant|>", "<|assistant|> w5")
    with pytest.raises(ValueError, match="was its end, and today's template gives 'w5'"):
        lint(other)
    other.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"token 0 was '<\|user\|>', and .* gives 'w0'"):
        lint(other)


def test_a_template_that_writes_the_date_is_told_once_and_not_refused():
    """It reads otherwise on another day, whatever anybody does."""
    dated = TransformersTarget(tiny_model(), tiny_tokenizer(), "tiny")
    dated.tokenizer.chat_template = "{% if strftime_now is defined %}w9 {% endif %}" + TEMPLATE
    report = lint(dated)
    assert len(report.warnings) == 1
    assert "writes today's date" in report.warnings[0]
    assert "(token 0 of prompt code-0 was '<|user|>' and is 'w9')" in report.warnings[0]


def test_texts_to_be_continued_need_no_template(target):
    row = {**PROMPTS["code-0"], "messages_json": "[]"}
    plain = asked(FIRST, *TOKENIZER(row["text"]).input_ids)
    report = lint_answers([plain], target, prompts={"code-0": row})
    assert report.metrics["lint_prompts_rendered"] == 1
    with pytest.raises(ValueError, match="another chat template"):
        lint_answers([FIRST], target, prompts={"code-0": row})


def test_a_prompt_that_waits_for_an_earlier_answer_is_not_rendered(target):
    turns = [USER, {"role": "assistant", "content": None}, USER]
    waiting = {**PROMPTS["code-0"], "messages_json": json.dumps(turns)}
    report = lint_answers([asked(FIRST, 7, 8, 9)], target, prompts={"code-0": waiting})
    assert report.metrics["lint_prompts_rendered"] == 0


def test_a_prompt_is_rendered_once_for_all_its_laws(target):
    sampled = [dataclasses.replace(row, law="sampled") for row in CLEAN]
    assert lint(target, *sampled).metrics["lint_prompts_rendered"] == 12
    assert lint(target, prompts=None).metrics["lint_prompts_rendered"] == 0


# ---------------------------------------------------------------------- whose words, and artifacts


def test_text_that_is_not_the_targets_is_measured_with_the_target(target):
    """Its own greedy answers: no token is another. Random ones: what a pass by hand says."""
    own, other = [], []
    for number, row in enumerate(CLEAN):
        ids = row.token_ids[: row.num_prompt_tokens].tolist()
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        own.append(TextExample(torch.tensor(ids), row.num_prompt_tokens, Sampling()))
        ids[-2] = (ids[-2] + 1 + number) % VOCAB_SIZE
        other.append(TextExample(torch.tensor(ids[:-1]), row.num_prompt_tokens, Sampling()))
    assert foreign_share(target, own) == 0
    assert foreign_share(target, other) == pytest.approx(1 / 5)
    report = lint_answers(other, target, own_words=False)
    assert report.metrics["lint_foreign_share"] == pytest.approx(1 / 5)
    (warning,) = (text for text in report.warnings if "not the target's own" in text)
    assert "at 20% of its tokens (of 12 responses)" in warning
    assert "text=answers" in warning
    assert "lint_foreign_share" not in lint_answers(other, target).metrics
    many = lint_answers(other * 3, target, own_words=False)
    assert f"(of {MOST_ASKED} responses)" in " ".join(many.warnings)


def test_own_words_are_told_apart_although_the_target_agrees():
    """A share of 0 is said too: the flag is about where the text comes from."""
    assert len(remarks({"lint_foreign_share": 0.0}, 3)) == 1
    assert remarks({"lint_loop_share": 0.0}, 0) == []


@dataclasses.dataclass(frozen=True)
class Data:
    """Prompts as a source, so that a pipeline can be built around them."""

    def load(self, seed: int) -> Any:
        raise AssertionError("written by hand")

    def identity(self) -> dict[str, str]:
        return {"kind": "by hand"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written(Prepare):
    """Stands where prompts come from."""

    def __post_init__(self) -> None:
        pass

    def run(self, workspace: Any) -> dict[str, Any]:
        write_prompts(workspace.out, {"drafter_train": [*PROMPTS.values()]})
        return {}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target's folder, and the answers that a pipeline has made with it."""
    root = tmp_path_factory.mktemp("lint")
    tiny_target_folder(root / "target")
    settings = dict.fromkeys(("router_train_percent", "validation_percent", "test_percent"), 10)
    rest = {"min_prompts": 1, "max_prompt_chars": 99, "leak_words": 0, "boilerplate_rows": 20}
    prepare = Written(
        **settings,
        **rest,
        benches=[],
        leaking_rows="refuse",
        follow_up_percent=0,
        follow_ups=[],
        text_task_percent=0,
        text_tasks=[],
    )
    groups = {"data": Data(), "target": tiny_config(root / "target")}
    stages = {"prepare": prepare, "regenerate": regenerate_stage()}
    line = Pipeline(stages, groups, root / "out", 3, RUNTIME, build_missing=True)
    return root / "target", line.run("regenerate")


def test_a_folder_of_answers_is_linted_with_the_prompts_behind_it(artifacts, target, tmp_path):
    folder, answers = artifacts
    report = lint_answers(answers, target, config=tiny_config(folder))
    assert report.metrics["lint_rows"] == report.metrics["lint_prompts_rendered"] == 12
    report.save(tmp_path)
    assert read_lint(tmp_path) == report.metrics
    assert read_lint(tmp_path / "none") == {}
    given = lint_answers(answers, target, prompts=next((answers.parents[1] / "prepare").glob("*/")))
    assert given.metrics == report.metrics
    found = prompts_behind(answers)
    assert found is not None
    assert set(found) == set(PROMPTS)
    assert len(found) == 12


def test_answers_of_another_target_are_refused(artifacts, target, tmp_path):
    folder, answers = artifacts
    other = tiny_config(tiny_target_folder(tmp_path / "other", seed=1))
    with pytest.raises(ValueError, match=r"another target than .*other \(they differ in weights\)"):
        lint_answers(answers, target, config=other)
    changed = tiny_target_folder(tmp_path / "changed")
    (changed / "chat_template.jinja").write_text(TEMPLATE + " ")
    with pytest.raises(ValueError, match=r"differ in chat template\); run stage=regenerate"):
        lint_answers(answers, target, config=tiny_config(changed))
    assert lint_answers(answers, target, config=tiny_config(folder)).metrics["lint_rows"] == 12


def test_a_folder_that_stands_alone_is_linted_without_prompts(artifacts, target, tmp_path):
    _, answers = artifacts
    alone = tmp_path / "regenerate" / "alone"
    alone.mkdir(parents=True)
    for path in answers.iterdir():
        (alone / path.name).write_bytes(path.read_bytes())
    report = lint_answers(alone, target, config=tiny_config(artifacts[0]))
    assert report.metrics["lint_prompts_rendered"] == 0
    (alone / "manifest.json").unlink()
    assert lint_answers(alone, target, config=tiny_config(artifacts[0])).metrics["lint_rows"] == 12


def test_a_warning_is_said_once_however_many_drafters_learn(target, caplog):
    texts = [said(row, EOS, reason="eos") for row in CLEAN]
    for _ in range(3):
        lint_answers(texts, target).tell()
    assert sum("answers are empty" in record.getMessage() for record in caplog.records) == 1


# ----------------------------------------------------------------------------- in other stages


def test_regenerate_looks_at_prompts_before_and_at_answers_after(artifacts, tmp_path):
    _, answers = artifacts
    assert read_manifest(answers)["metrics"]["lint_rows"] == 12
    other = tiny_target_folder(tmp_path / "target")
    (other / "chat_template.jinja").write_text(NO_PROMPT)
    prompts = write_prompts(tmp_path / "prompts", {"drafter_train": [*PROMPTS.values()]})
    place = workspace({"target": tiny_config(other)}, {"prompts": prompts}, tmp_path / "out")
    with pytest.raises(ValueError, match="ignores add_generation_prompt"):
        regenerate_stage().run(place)
    assert not list((tmp_path / "out").glob("answers-*"))


def test_training_keeps_what_the_linter_found(world: World, tmp_path):  # noqa: F811
    metrics = train(distill(), world, tmp_path)
    assert metrics["lint_rows"] == 16
    assert read_lint(tmp_path).items() <= metrics.items()
    again = train(distill(), world, tmp_path)  # as after a kill at the very end
    assert again == metrics
    own = train(finetune(text="dataset"), world, tmp_path / "dataset")
    assert 0 < own["lint_foreign_share"] <= 1


def rewritten(world: World, out: Path, change: Callable[..., None]) -> World:  # noqa: F811
    """The world with other answers in its first shard of training."""
    reader = Answers(world.answers)
    out.mkdir()
    writer = AnswerWriter(out, reader.laws, num_top_logits=7, dtype="float32")
    for number, shard in enumerate(reader.shards):
        rows = list(reader._open(shard, with_teacher=True))
        if number == 0:
            for row in rows:
                change(row.token_ids[row.num_prompt_tokens :])
        writer.write(shard.split, rows, torch.float32, 1.0)
    return dataclasses.replace(world, answers=out)


def test_training_refuses_what_the_linter_refuses(world: World, tmp_path):  # noqa: F811
    damaged = rewritten(world, tmp_path / "answers", lambda ids: ids.copy_(torch.arange(len(ids))))
    with pytest.raises(ValueError, match=r"^answer .* goes on after '</s>'"):
        train(distill(), damaged, tmp_path / "out")
    assert not (tmp_path / "out" / "drafter.json").exists()


def test_training_leaves_loops_out_where_asked(world: World, tmp_path, monkeypatch):  # noqa: F811
    """Answers here have 9 tokens, too few to loop: another rule stands in for the real one."""
    looping = rewritten(world, tmp_path / "answers", lambda ids: ids.fill_(7))
    monkeypatch.setattr("pipeline.lint.loops", lambda text: bool((text == 7).all()))
    every = train(distill(), looping, tmp_path / "every")
    fewer = train(distill(drop_loops=True), looping, tmp_path / "fewer")
    assert every["num_rows"] == 16
    assert every["lint_loop_share"] * 16 == fewer["lint_loops_dropped"] == 16 - fewer["num_rows"]
    assert fewer["lint_loops_dropped"] == Answers(looping.answers).shards[0].num_rows
