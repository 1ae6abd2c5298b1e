"""What a drafter is about to learn from, checked before it does.

What would teach it wrong is refused, in a sentence that names the row; what is only remarkable is a
warning and a number among the metrics. Rows pass through one by one, so nothing is read twice.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from decode.targets.transformers import TransformersTarget
from drafters.network_drafter import NetworkDrafter
from drafters.tokenizers import num_real_ids
from drafters.training import AnswerLike
from pipeline.answers import Answers
from pipeline.generation import EOS, LENGTH
from pipeline.lint_report import Counts, LintReport, lines, remarks
from pipeline.lint_sources import Prompts, prompts_behind, refuse_other_target
from pipeline.models import TargetConfig
from pipeline.progress import progress
from pipeline.row_lint import check_end, check_ids, check_learned, check_start, loops
from pipeline.template_lint import TemplateLint

A = TypeVar("A", bound=AnswerLike)
SHORT = 4  # tokens; a longer answer is not empty
MOST_RENDERED = 2000  # prompts are rendered again: regenerate put them in an order by lot
MOST_ASKED = 16  # responses that are not the target's own are shown to it
MOST_READ = 512  # tokens of each


def lint_answers(
    answers: Path | Iterable[AnswerLike], target: TransformersTarget, **settings: Any
) -> LintReport:
    """What is to be said of a folder of answers, or of rows; the settings are those of `Linter`.

    Raises ValueError at the first row that must not be learned from.
    """
    if isinstance(answers, Path):
        linter = Linter.of_answers(answers, target, **settings)
        rows: Iterable[AnswerLike] = Answers(answers).rows(with_teacher=False)
    else:
        linter, rows = Linter(target, **settings), answers
    for _ in linter.passing(rows):
        pass
    return linter.report()


def lint_prompts(rows: Iterable[tuple[Mapping[str, Any], list[int]]], tokenizer: Any) -> None:
    """Check (row of prepare, token ids of its prompt) before a target spends hours on them.

    Raises ValueError at the first prompt that must not be answered.
    """
    template = TemplateLint(tokenizer)
    for number, (prompt, ids) in enumerate(rows):
        check_start(f"prompt {prompt['id']}", np.array(ids), tokenizer)
        if number < MOST_RENDERED:
            template.check(prompt, ids)


class Linter:
    """Lets rows through to who learns from them, and knows afterwards what they were like.

    prompts     rows of prepare by id, to be rendered again; None: templates are not checked
    drafter     whose draft vocabulary the answers are held against
    max_tokens  after which rows are cut, prompt included; 0: never
    drop_loops  whether answers that end in a loop are held back
    own_words   whether the text is said to be the target's; if not, the target is asked about some
    """

    def __init__(
        self,
        target: TransformersTarget,
        *,
        prompts: Mapping[str, Mapping[str, Any]] | None = None,
        drafter: NetworkDrafter | None = None,
        max_tokens: int = 0,
        drop_loops: bool = False,
        own_words: bool = True,
    ) -> None:
        assert target.tokenizer is not None
        self.target, self.tokenizer = target, target.tokenizer
        self.prompts, self.template = prompts, TemplateLint(target.tokenizer)
        self.max_tokens, self.drop_loops, self.own_words = max_tokens, drop_loops, own_words
        self.num_real_ids = num_real_ids(target.tokenizer)
        self.draftable = None if drafter is None else draftable(drafter, self.num_real_ids)
        self.counts = Counts()
        self._rendered: set[str] = set()
        self._said: dict[int, str] = {}  # an answer's hash -> the row that had it first
        self._asked: list[AnswerLike] = []

    @classmethod
    def of_answers(
        cls,
        folder: Path,
        target: TransformersTarget,
        *,
        config: TargetConfig | None = None,
        prompts: Path | None = None,
        **settings: Any,
    ) -> "Linter":
        """For answers of a folder: checks that `config`'s target gave them, and finds the prompts.

        `prompts` is prepare's folder; None: the one that the folder of answers names.
        """
        if config is not None:
            refuse_other_target(folder, config)
        found = prompts_behind(folder) if prompts is None else Prompts(prompts)
        return cls(target, prompts=found, **settings)

    def passing(self, answers: Iterable[A]) -> Iterator[A]:
        """The same rows but for those that are held back; raises ValueError at a wrong one."""
        with progress("lint", None, "answers") as meter:
            for answer in answers:
                self._check(answer)
                looping = self._count(answer)
                if looping and self.drop_loops:
                    self.counts.num_dropped += 1
                else:
                    yield answer
                meter.advance()

    def report(self) -> LintReport:
        """What the rows were like that have passed."""
        metrics = self.counts.metrics() | {
            "lint_columns": self.target.vocab_size,
            "lint_real_ids": self.num_real_ids,
            "lint_prompts_rendered": self.template.num_checked,
        }
        if self.draftable is not None:
            metrics |= self.counts.outside_shares()
        if self._asked:
            metrics["lint_foreign_share"] = foreign_share(self.target, self._asked)
        warnings = [*self.template.warnings, *remarks(metrics, len(self._asked))]
        metrics["lint_num_warnings"] = len(warnings)
        return LintReport(metrics, warnings, lines(metrics))

    def _check(self, answer: AnswerLike) -> None:
        name, ids = self._name(answer), answer.token_ids.cpu().numpy()
        num_prompt = answer.num_prompt_tokens
        check_learned(name, len(ids), num_prompt, bool(getattr(answer, "text", True)))
        check_ids(name, ids, num_prompt, self.target.vocab_size, self.num_real_ids)
        check_start(name, ids[:num_prompt], self.tokenizer)
        reason = getattr(answer, "finish_reason", None)
        if reason is not None:
            ends = self.target.eos_token_ids
            check_end(name, ids[num_prompt:], reason == EOS, ends, self.tokenizer)
        self._check_prompt(getattr(answer, "id", ""), ids[:num_prompt].tolist())

    def _check_prompt(self, name: str, token_ids: list[int]) -> None:
        """Render the prompt again, once for all laws under which it was answered."""
        if self.prompts is None or name not in self.prompts or name in self._rendered:
            return
        if len(self._rendered) < MOST_RENDERED:
            self._rendered.add(name)
            self.template.check(self.prompts[name], token_ids)

    def _count(self, answer: AnswerLike) -> bool:
        """Add the row to the counts; whether it ends in a loop."""
        counts, text = self.counts, answer.token_ids.cpu().numpy()[answer.num_prompt_tokens :]
        facts = {
            "loop": loops(text),
            "cut": getattr(answer, "finish_reason", None) == LENGTH,
            "empty": self._is_empty(text),
            "duplicate": self._is_duplicate(answer, text),
            "too_long": 0 < self.max_tokens <= max(answer.num_prompt_tokens, 1),
        }
        counts.rows.update(name for name, found in facts.items() if found)
        counts.prompt_tokens.append(answer.num_prompt_tokens)
        counts.answer_tokens.append(len(text))
        domain = getattr(answer, "domain", "")
        counts.tokens[domain] += len(text)
        if self.draftable is not None:
            counts.outside[domain] += int(np.count_nonzero(~self.draftable[text]))
        counts.padding += int(np.count_nonzero(text >= self.num_real_ids))
        if not self.own_words and len(self._asked) < MOST_ASKED:
            self._asked.append(answer)
        return facts["loop"]

    def _name(self, answer: AnswerLike) -> str:
        if hasattr(answer, "id"):
            return f"answer {answer.id} ({getattr(answer, 'law', 'no law')})"
        return f"row {len(self.counts.answer_tokens) + 1} of the text to learn"

    def _is_empty(self, text: np.ndarray) -> bool:
        if len(text) > SHORT:
            return False
        return not self.tokenizer.decode(text.tolist(), skip_special_tokens=True).strip()

    def _is_duplicate(self, answer: AnswerLike, text: np.ndarray) -> bool:
        mine = getattr(answer, "id", self._name(answer))
        key = hash((getattr(answer, "law", ""), text.tobytes()))
        return self._said.setdefault(key, mine) != mine


def draftable(drafter: NetworkDrafter, num_real_ids: int) -> np.ndarray:  # [V] bool
    """Which of the target's ids a drafter may propose."""
    allowed = np.zeros(drafter.vocab_size, dtype=bool)
    ids = drafter.draft_ids
    allowed[slice(num_real_ids) if ids is None else ids.cpu().numpy()] = True
    return allowed


@torch.no_grad()
def foreign_share(target: TransformersTarget, rows: Iterable[AnswerLike]) -> float:
    """Share of the answer tokens of which the target's likeliest choice is another."""
    wrong = total = 0
    for row in rows:
        ids = row.token_ids[: min(MOST_READ, target.max_context)].to(target.device)
        first = max(row.num_prompt_tokens, 1)
        choices = target.model(input_ids=ids[None]).logits[0, first - 1 : -1].argmax(dim=-1)
        wrong += int((choices != ids[first:]).sum())
        total += len(choices)
    return wrong / max(total, 1)
