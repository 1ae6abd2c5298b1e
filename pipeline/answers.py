"""The target's answers on disk: safetensors shards, and an index that holds their digests.

A shard is one file: its tensors are the rows one after another, its header says where each row
ends. The index is rewritten, atomically, after each shard; a shard that the index does not name is
not there. While several processes answer, a shard may be whole before those in front of it are:
then a note beside it, with what the index will say of it, tells so.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from decode.types import Sampling
from pipeline.manifest import sha256, write_json

INDEX = "index.json"
REMEDY = "run stage=regenerate force=true to answer the prompts again"
TOP = ("topk_ids", "topk_logits")
ROW_FIELDS = (
    "id",
    "split",
    "domain",
    "family",
    "text",
    "law",
    "num_prompt_tokens",
    "finish_reason",
)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One prompt, the target's answer under one named law, and what it thought at each token.

    A is the number of answer tokens, EOS included where there is one. Logits and `lse` are raw
    (before temperature); `logprobs` belong to the processed law and are 0 under a greedy one.
    """

    id: str
    split: str
    domain: str
    family: str
    text: str  # what the person wrote
    law: str
    sampling: Sampling
    token_ids: Tensor  # [T] int64, prompt and answer
    num_prompt_tokens: int
    logprobs: Tensor  # [A] float32
    lse: Tensor  # [A] float32, log-sum-exp of the raw logits
    topk_ids: Tensor  # [A, k] int64, best first
    topk_logits: Tensor  # [A, k] float32
    finish_reason: str  # "eos" or "length"

    @property
    def answer_ids(self) -> Tensor:  # [A]
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Shard:
    """One line of the index: what can be known of a shard without opening it."""

    file: str
    sha256: str
    split: str
    num_rows: int
    domains: list[str]
    laws: list[str]
    seconds: float  # that the process which answered it took


class Answers:
    """Reads a folder of answers shard by shard; a digest is checked before a shard's first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / INDEX
        if not path.exists():
            raise ValueError(
                f"{path} is missing, so there are no answers to read; run stage=regenerate first"
            )
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is damaged ({error}); {REMEDY}") from error
        self.header: dict[str, Any] = index["header"]
        self.shards = [Shard(**entry) for entry in index["shards"]]
        self.laws = {name: Sampling(**fields) for name, fields in self.header["laws"].items()}
        self._checked: set[str] = set()

    def rows(
        self,
        split: str | None = None,
        domain: str | None = None,
        law: str | None = None,
        with_teacher: bool = True,
    ) -> Iterator[Answer]:
        """The answers that match, in the order in which they were made, shard by shard.

        The top logits, most of a shard, are empty (k = 0) and stay on disk without `with_teacher`.
        """
        for shard in self.shards:
            fits = split in (None, shard.split) and (domain is None or domain in shard.domains)
            if fits and (law is None or law in shard.laws):
                for answer in self._open(shard, with_teacher):
                    if domain in (None, answer.domain) and law in (None, answer.law):
                        yield answer

    def _open(self, shard: Shard, with_teacher: bool) -> Iterator[Answer]:
        if shard.file not in self._checked:
            verify(self.folder, shard)
            self._checked.add(shard.file)
        with safe_open(str(self.folder / shard.file), framework="pt") as file:
            rows = json.loads(file.metadata()["rows"])
            tensors = {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118
                if with_teacher or name not in TOP
            }
        for name in TOP:
            tensors.setdefault(name, torch.zeros(len(tensors["lse"]), 0))
        start = first = 0  # of the row's tokens, of its answer
        for row in rows:
            num_tokens = row.pop("num_tokens")
            num_answer = num_tokens - row["num_prompt_tokens"]
            answer = slice(first, first + num_answer)
            yield Answer(
                **row,
                sampling=self.laws[row["law"]],
                token_ids=tensors["token_ids"][start : start + num_tokens].long(),
                logprobs=tensors["logprobs"][answer],
                lse=tensors["lse"][answer],
                topk_ids=tensors["topk_ids"][answer].long(),
                topk_logits=tensors["topk_logits"][answer].float(),
            )
            start, first = start + num_tokens, first + num_answer


def verify(folder: Path, shard: Shard) -> None:
    """Raise ValueError where a shard's bytes are not what was written."""
    path = folder / shard.file
    if not path.exists():
        raise ValueError(f"{path} is missing although {INDEX} names it; {REMEDY}")
    if sha256(path) != shard.sha256:
        raise ValueError(f"{path} is damaged: its sha256 is not the one in {INDEX}; {REMEDY}")


class AnswerWriter:
    """Writes shards; on a folder that has some already it goes on after them.

    Several processes may write to one folder, each its own shards: one of them leads and keeps the
    index, to which `gather` adds the shards of all, in order.
    """

    def __init__(
        self, folder: Path, laws: dict[str, Sampling], *, leads: bool = True, **header: Any
    ) -> None:
        self.folder, self.leads = folder, leads
        self.header = {"laws": {name: asdict(law) for name, law in laws.items()}, **header}
        self.shards: list[Shard] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._read_index()
        if leads:
            self._go_on()

    def _read_index(self) -> None:
        path = self.folder / INDEX
        if path.exists():
            there = Answers(self.folder)
            self._refuse_other(there.header, path)
            self.shards = there.shards

    def _go_on(self) -> None:
        """Check what is there before anything is added to it."""
        shards = [*self.shards]
        for note in sorted(self.folder.glob("answers-*.json")):
            shard = self._read_note(note)
            if shard in self.shards:  # killed before it was taken away
                note.unlink()
            else:
                shards.append(shard)
        for shard in shards:
            verify(self.folder, shard)
        self.gather()

    def _refuse_other(self, header: dict[str, Any], path: Path) -> None:
        if header != json.loads(json.dumps(self.header)):
            raise ValueError(
                f"{path} was begun with {header} but this run has {self.header}; {REMEDY}"
            )

    def has(self, number: int) -> bool:
        """Whether that shard is whole, in the index or with a note."""
        if self._note(number).exists():
            return True
        if not self.leads:  # looked at after the note, which goes once the index has its shard
            self.gather()
        return number < len(self.shards)

    def write(
        self,
        split: str,
        answers: Sequence[Answer],
        logits_dtype: torch.dtype,
        seconds: float,
        number: int | None = None,
    ) -> None:
        """Add one shard, the next unless a number is given: the file first, then what names it."""
        number = len(self.shards) if number is None else number
        name = f"answers-{number:05d}.safetensors"
        path = self.folder / name
        partial = path.with_name(name + ".partial")
        rows = [
            {field: getattr(answer, field) for field in ROW_FIELDS}
            | {"num_tokens": len(answer.token_ids)}
            for answer in answers
        ]
        save_file(_joined(answers, logits_dtype), partial, metadata={"rows": json.dumps(rows)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
        domains, laws = (sorted({row[key] for row in rows}) for key in ("domain", "law"))
        shard = Shard(name, sha256(path), split, len(rows), domains, laws, seconds)
        if self.leads and number == len(self.shards):
            self.shards.append(shard)
            self._write_index()
        else:
            write_json(self._note(number), {"header": self.header, "shard": asdict(shard)})

    def gather(self) -> list[int]:
        """The numbers of the shards that the index has now, and had not, from notes.

        Who does not lead sees what the leader has gathered.
        """
        before = len(self.shards)
        if not self.leads:
            self._read_index()
            return list(range(before, len(self.shards)))
        while (note := self._note(len(self.shards))).exists():
            self.shards.append(self._read_note(note))
        found = list(range(before, len(self.shards)))
        if found:
            self._write_index()
        for number in found:
            self._note(number).unlink()
        return found

    def _note(self, number: int) -> Path:
        return self.folder / f"answers-{number:05d}.json"

    def _read_note(self, path: Path) -> Shard:
        try:
            note = json.loads(path.read_text(encoding="utf-8"))
            header, shard = note["header"], Shard(**note["shard"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); {REMEDY}") from error
        self._refuse_other(header, path)
        return shard

    def _write_index(self) -> None:
        write_json(
            self.folder / INDEX,
            {"header": self.header, "shards": [asdict(shard) for shard in self.shards]},
        )


def _joined(answers: Sequence[Answer], logits_dtype: torch.dtype) -> dict[str, Tensor]:
    """The rows' tensors end to end; logits keep the precision in which the target computed them."""
    return {
        "token_ids": torch.cat([answer.token_ids for answer in answers]).int(),
        "logprobs": torch.cat([answer.logprobs for answer in answers]).float(),
        "lse": torch.cat([answer.lse for answer in answers]).float(),
        "topk_ids": torch.cat([answer.topk_ids for answer in answers]).int(),
        "topk_logits": torch.cat([answer.topk_logits for answer in answers]).to(logits_dtype),
    }
