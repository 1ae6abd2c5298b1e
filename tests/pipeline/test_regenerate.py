"""Would catch: left padding that leaks into a row's logits, cache rows that no longer match their
jobs after one leaves, a last token that is lost or an EOS that is dropped, numbers noted for the
wrong token, draws that depend on the batch, one law for a whole domain, a resumed run that
writes other files.

Tolerances: log-sum-exp and logits of a padded batch against one unpadded pass agree to 1e-4
(float32, values of some 10, sums in another order); log-probabilities likewise. Tokens and files
must be equal.
"""

import shutil
from pathlib import Path

import pytest
import torch
from tiny import EOS, VOCAB_SIZE, tiny_model, tiny_target_folder
from workspace import prompt, tiny_config, workspace, write_prompts

from decode.sampling import law_of
from decode.types import Sampling
from kernels.reference import processed_probs
from pipeline import regenerate
from pipeline.answers import Answers
from pipeline.generation import Generator, Job
from pipeline.regenerate import Regenerate, balanced
from pipeline.runtime import Runtime

SPLITS = {
    "drafter_train": [prompt(n, d, words=2 + n % 4) for n in range(5) for d in ("code", "chat")],
    "validation": [
        prompt(n, d, words=1 + 3 * n) for n in range(10, 13) for d in ("code", "chat", "odd")
    ],
}


def stage(**changes: object) -> Regenerate:
    settings: dict[str, object] = {
        "laws": {"drafter_train": "alternate", "validation": "both", "mixed": "both"},
        "prompts_per_domain": {"drafter_train": 0, "validation": 2, "mixed": 0},
        "max_new_tokens": {"drafter_train": 9, "validation": 6, "mixed": 6},
        "max_prompt_tokens": 38,
        "temperature": 0.8,
        "top_p": 0.95,
        "batch_size": 3,
        "shard_rows": 4,
        "num_top_logits": 7,
        "dtype": "float32",
    }
    return Regenerate(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, dict[str, float]]:
    """Target, prompts, answers, metrics."""
    root = tmp_path_factory.mktemp("regenerate")
    target, prompts = tiny_target_folder(root / "target"), write_prompts(root / "prompts", SPLITS)
    metrics = run(stage(), target, prompts, root / "out")
    return target, prompts, root / "out", metrics


# The index says how long each shard took; by this clock, equally long in every run.
VIRTUAL = Runtime(device="cpu", threads=1, clock="virtual")


def run(stage: Regenerate, target: Path, prompts: Path, out: Path) -> dict[str, float]:
    given = {"target": tiny_config(target)}, {"prompts": prompts}
    return stage.run(workspace(*given, out, runtime=VIRTUAL))


def jobs(temperature: float, lengths: tuple[int, ...] = (3, 11, 1, 7, 5)) -> list[Job]:
    return [
        Job(
            f"row {n}",
            [(n * 13 + i) % VOCAB_SIZE for i in range(length)],
            Sampling(temperature=temperature, seed=n),
            4 + 5 * n,
        )
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_is_what_it_would_be_alone(temperature: float) -> None:
    """Rows of five lengths, each ending at its own time, against each row in a batch of its own."""
    generator = Generator(tiny_model(), frozenset({EOS}), 5)
    together = generator.answer(jobs(temperature))
    for job, trace in zip(jobs(temperature), together, strict=True):
        (alone,) = generator.answer([job])
        assert trace.token_ids == alone.token_ids
        assert trace.finish_reason == alone.finish_reason
        torch.testing.assert_close(trace.lse, alone.lse, atol=1e-4, rtol=0)
    assert (
        len({len(trace.token_ids) for trace in together}) > 2
    )  # rows did leave at different times


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_notes_belong_to_their_tokens(temperature: float) -> None:
    """One teacher-forced pass over prompt and answer gives the same laws."""
    model = tiny_model()
    for job, trace in zip(
        jobs(temperature),
        Generator(model, frozenset({EOS}), 5).answer(jobs(temperature)),
        strict=True,
    ):
        with torch.no_grad():
            logits = model(torch.tensor([job.prompt_ids + trace.token_ids])).logits[0]
        logits = logits[len(job.prompt_ids) - 1 : -1]
        probs = processed_probs(logits, *law_of((job.sampling,) * len(logits)))
        chosen = probs.gather(1, torch.tensor(trace.token_ids)[:, None])[:, 0].log()
        torch.testing.assert_close(torch.tensor(trace.logprobs), chosen.float(), atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(trace.lse), logits.logsumexp(-1), atol=1e-4, rtol=0)
        best = torch.stack(trace.topk_ids).long()
        torch.testing.assert_close(
            torch.stack(trace.topk_logits), logits.gather(1, best), atol=1e-4, rtol=0
        )
        assert torch.equal(best, logits.topk(5).indices)
        if temperature == 0:
            assert trace.token_ids == best[:, 0].tolist()


def test_eos_ends_a_row_and_is_kept() -> None:
    model = tiny_model()
    free = Generator(model, frozenset(), 5).answer(jobs(0.9))
    eos = free[3].token_ids[6]
    ended = Generator(model, frozenset({eos}), 5).answer(jobs(0.9))
    for with_eos, without in zip(ended, free, strict=True):
        stop = (
            without.token_ids.index(eos) + 1 if eos in without.token_ids else len(without.token_ids)
        )
        assert with_eos.token_ids == without.token_ids[:stop]
        assert (with_eos.finish_reason == "eos") == (eos in without.token_ids)


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="not finite while answering row 0"):
        Generator(model, frozenset({EOS}), 5).answer(jobs(0.0))


def test_every_split_gets_its_laws(made: tuple[Path, Path, Path, dict[str, float]]) -> None:
    _, _, out, metrics = made
    train = list(Answers(out).rows(split="drafter_train"))
    for domain in ("code", "chat"):
        laws = [row.law for row in train if row.domain == domain]
        assert sorted(laws) == ["greedy"] * 3 + ["sampled"] * 2
    assert len({row.id for row in train}) == len(train) == 10
    validation = [(row.id, row.law) for row in Answers(out).rows(split="validation")]
    assert len(set(validation)) == len(validation)
    # Two prompts of three domains under two laws, less those that are too long.
    assert len(validation) + metrics["prompts_left_out"] == 12
    assert metrics["num_answers"] == len(train) + len(validation)
    assert metrics["tokens_per_second"] > 0
    assert 0 < metrics["distinct_8gram_share"] <= 1


def test_selection_ignores_the_order_of_the_data() -> None:
    prompts = SPLITS["drafter_train"]
    forwards, backwards = balanced(prompts, 3, 7), balanced(prompts[::-1], 3, 7)
    key = lambda entry: (entry[0], entry[1]["id"])  # noqa: E731
    assert sorted(map(key, forwards)) == sorted(map(key, backwards))
    assert [place for place, _ in forwards] == [0, 0, 1, 1, 2, 2]
    assert sorted(map(key, balanced(prompts, 3, 8))) != sorted(map(key, forwards))


def test_a_killed_run_resumes_with_the_same_files(
    made: tuple[Path, Path, Path, dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts, whole, metrics = made
    calls = 0
    answer = Generator.answer

    def dies(self: Generator, batch: list[Job]) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:  # in the middle of the second shard
            raise KeyboardInterrupt
        return answer(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(regenerate.Generator, "answer", dies)
        with pytest.raises(KeyboardInterrupt):
            run(stage(), target, prompts, tmp_path / "out")
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == ["answers-00000.safetensors", "index.json"]
    resumed = run(stage(), target, prompts, tmp_path / "out")
    assert resumed == metrics
    for path in sorted(whole.iterdir()):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


def test_a_resumed_run_refuses_a_truncated_shard(
    made: tuple[Path, Path, Path, dict[str, float]], tmp_path: Path
) -> None:
    target, prompts, whole, _ = made
    shutil.copytree(whole, tmp_path / "out")
    shard = tmp_path / "out" / "answers-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"answers-00001\.safetensors is damaged.*force=true"):
        run(stage(), target, prompts, tmp_path / "out")


def test_settings_that_do_not_fit_are_named(
    made: tuple[Path, Path, Path, dict[str, float]], tmp_path: Path
) -> None:
    target, prompts, _, _ = made
    with pytest.raises(ValueError, match=r"max_new_tokens names the splits \['test'\]"):
        stage(max_new_tokens={"test": 3})
    with pytest.raises(ValueError, match=r"laws\.drafter_train=hot is unknown"):
        stage(laws={"drafter_train": "hot", "validation": "both", "mixed": "both"})
    with pytest.raises(ValueError, match="max_prompt_tokens=1 and"):
        run(stage(max_prompt_tokens=1), target, prompts, tmp_path / "short")
    with pytest.raises(ValueError, match="dtype=float8 is not known"):
        run(stage(dtype="float8"), target, prompts, tmp_path / "dtype")
