"""Would catch: rows cut at the wrong offset (prompt and answer lengths mixed up), filters that skip
a shard or a row, logits that lose precision on disk, a damaged or missing shard that is read all
the same, a second run that goes on after another one's shards.

Tolerances: none. What is written must come back bit for bit.
"""

import json
from pathlib import Path

import pytest
import torch

from decode.types import Sampling
from pipeline.answers import INDEX, Answer, Answers, AnswerWriter

LAWS = {"greedy": Sampling(seed=5), "sampled": Sampling(temperature=0.8, top_p=0.9, seed=5)}


def answer(number: int, split: str, domain: str, law: str, prompt: int, new: int) -> Answer:
    torch.manual_seed(number)
    return Answer(
        id=f"p{number}",
        split=split,
        domain=domain,
        family=f"family {number}",
        text='what "they" wrote\n\u00fc',
        law=law,
        sampling=LAWS[law],
        token_ids=torch.randint(0, 97, (prompt + new,)),
        num_prompt_tokens=prompt,
        logprobs=torch.randn(new),
        lse=torch.randn(new),
        topk_ids=torch.randint(0, 97, (new, 5)),
        topk_logits=torch.randn(new, 5).bfloat16().float(),
        finish_reason="eos" if number % 2 else "length",
    )


ROWS = [
    [
        answer(0, "validation", "code", "greedy", 3, 7),
        answer(1, "validation", "chat", "sampled", 1, 1),
    ],
    [answer(2, "test", "code", "sampled", 11, 2)],
    [
        answer(3, "validation", "code", "sampled", 2, 4),
        answer(4, "validation", "code", "greedy", 5, 9),
    ],
]


def write(folder: Path, num_shards: int = 3) -> Path:
    writer = AnswerWriter(folder, LAWS, num_top_logits=5, dtype="bfloat16")
    for rows in ROWS[len(writer.shards) : num_shards]:
        writer.write(rows[0].split, rows, torch.bfloat16, 0.5)
    return folder


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    wanted = [row for rows in ROWS for row in rows]
    found = list(Answers(write(tmp_path)).rows())
    assert len(found) == len(wanted)
    for there, given in zip(found, wanted, strict=True):
        for name in Answer.__slots__:
            left, right = getattr(there, name), getattr(given, name)
            same = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
            assert same, name
        assert len(there.answer_ids) == len(there.logprobs)


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        ({"split": "validation"}, ["p0", "p1", "p3", "p4"]),
        ({"split": "validation", "domain": "code"}, ["p0", "p3", "p4"]),
        ({"domain": "code", "law": "sampled"}, ["p2", "p3"]),
        ({"split": "test", "law": "greedy"}, []),
    ],
)
def test_filters(tmp_path: Path, filters: dict[str, str], ids: list[str]) -> None:
    assert [row.id for row in Answers(write(tmp_path)).rows(**filters)] == ids


def test_a_shard_is_read_only_when_it_is_needed(tmp_path: Path) -> None:
    answers = Answers(write(tmp_path))
    (tmp_path / answers.shards[1].file).unlink()
    assert [row.id for row in answers.rows(split="validation")] == ["p0", "p1", "p3", "p4"]


def test_damage_is_named(tmp_path: Path) -> None:
    path = write(tmp_path) / "answers-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"answers-00001\.safetensors is damaged.*force=true"):
        list(Answers(tmp_path).rows())
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"answers-00001\.safetensors is damaged"):
        list(Answers(tmp_path).rows())
    path.unlink()
    with pytest.raises(ValueError, match=r"answers-00001\.safetensors is missing"):
        list(Answers(tmp_path).rows())


def test_a_damaged_or_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run stage=regenerate first"):
        Answers(tmp_path)
    index = write(tmp_path) / INDEX
    index.write_text(index.read_text()[:-20])
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        Answers(tmp_path)


def test_writing_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole, parts = write(tmp_path / "whole"), write(tmp_path / "parts", num_shards=2)
    (parts / "answers-00002.safetensors").write_bytes(b"left behind by a killed run")
    write(parts)
    for path in sorted(whole.iterdir()):
        assert path.read_bytes() == (parts / path.name).read_bytes(), path.name
    assert not list(parts.glob("*.partial"))


def test_another_run_s_shards_are_not_continued(tmp_path: Path) -> None:
    write(tmp_path, num_shards=1)
    with pytest.raises(ValueError, match="was begun with"):
        AnswerWriter(tmp_path, LAWS, num_top_logits=5, dtype="float32")
    index = tmp_path / INDEX
    index.write_text(
        json.dumps(json.loads(index.read_text())).replace('"sha256": "', '"sha256": "0')
    )
    with pytest.raises(ValueError, match="is damaged"):
        write(tmp_path)
