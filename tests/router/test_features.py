"""Would catch: a feature that is not finite on odd texts, names and values out of step, a cue that
does not answer to its own words, a feature that grows with length alone, an encoder identity that
misses the weights.
"""

import math
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

import pipeline.models
from pipeline.models import EncoderConfig, resolve_encoder
from router.encoder import Encoder, SentenceEncoder, encoder_digest
from router.features import FEATURE_NAMES, feature_matrix, features
from router.model import Standardiser


def named(text: str, num_prompt_tokens: int = 20, temperature: float = 0.0) -> dict[str, float]:
    return dict(zip(FEATURE_NAMES, features(text, num_prompt_tokens, temperature), strict=True))


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n\n", "?", "\u4f60\u597d\U0001f600", "7" * 4000, "a\x00b", "```"]
)
def test_odd_texts_have_finite_features(text):
    assert all(math.isfinite(value) for value in features(text, 0, 0.0))


def test_cues_answer_to_their_words():
    code = named("```python\ndef area(r):\n    return 3.14 * r ** 2\n```\nRewrite this function.")
    chat = named("How should I thank a friend for dinner?")
    task = named("Calculate 12 * 7 - 5, then list the steps:\n- first\n- second")
    assert (code["code_fence"], chat["code_fence"]) == (1, 0)
    assert code["code_words"] > chat["code_words"] == 0
    assert code["code_symbols"] > task["code_symbols"]
    assert (chat["question_mark"], chat["question_word"], code["question_word"]) == (1, 1, 0)
    assert (code["copy_words"], code["solve_words"], task["solve_words"]) == (1, 0, 1)
    assert task["log_numbers"] == pytest.approx(math.log1p(3))
    assert task["list_items"] == pytest.approx(math.log1p(2))
    assert task["operators"] > chat["operators"]


def test_the_law_and_the_length_are_features():
    assert named("x", temperature=0.8)["temperature"] == 0.8
    assert (named("x")["greedy"], named("x", temperature=0.8)["greedy"]) == (1, 0)
    assert named("x", num_prompt_tokens=99)["log_prompt_tokens"] == pytest.approx(math.log(100))


def test_repeating_a_text_changes_lengths_only():
    once, thrice = named("sort 3 items (fast) "), named("sort 3 items (fast) " * 3)
    for name in ("digits", "code_symbols", "code_words", "capitals", "operators"):
        assert once[name] == pytest.approx(thrice[name]), name
    assert thrice["repeated_words"] > once["repeated_words"] == 0


def test_no_prompts_make_an_empty_matrix():
    assert feature_matrix([], [], []).shape == (0, len(FEATURE_NAMES))


def test_a_feature_that_never_varied_is_ignored_later():
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(5, 3, generator=generator)
    table = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    table[:, 1] = 0.3
    standardise = Standardiser.fit(embeddings, table)
    inputs = standardise(embeddings, table + torch.tensor([0.0, 9.0]))
    assert torch.equal(inputs[:, -1], torch.zeros(5, dtype=torch.float64))
    assert float(inputs[:, :3].square().sum(1).mean()) == pytest.approx(1)


def encoder_folder(folder: Path, weight: float = 1.0, pooling: str = "mean") -> Path:
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "1_Pooling" / "config.json").write_text(f'{{"mode": "{pooling}"}}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text(str(folder))
    save_file({"weight": torch.full((3,), weight)}, folder / "model.safetensors")
    return folder


def test_the_digest_follows_weights_and_pooling_and_not_the_place(tmp_path):
    first = encoder_digest(encoder_folder(tmp_path / "a"))
    assert first == encoder_digest(encoder_folder(tmp_path / "b"))
    assert first != encoder_digest(encoder_folder(tmp_path / "c", weight=2.0))
    assert first != encoder_digest(encoder_folder(tmp_path / "d", pooling="cls"))


def test_an_encoder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no model.safetensors; point encoder.name_or_path"):
        _ = SentenceEncoder(tmp_path).digest


@pytest.mark.slow
def test_the_real_encoder_tells_topics_apart_whatever_the_batch():
    """Cosines of one text in two batches differ by padding only: 1e-5 in float32."""
    conf = Path(pipeline.models.__file__).parents[1] / "conf" / "encoder" / "minilm.yaml"
    values = yaml.safe_load(conf.read_text())
    values.pop("_target_")
    encoder = SentenceEncoder(resolve_encoder(EncoderConfig(**values)), batch_size=2)
    assert isinstance(encoder, Encoder)
    texts = [
        "Write a Python function that sorts a list.",
        "Implement quicksort in C.",
        "",
        "Plan a dinner.",
    ]
    vectors = encoder.encode(texts)
    assert vectors.shape == (4, 384)
    assert vectors.dtype == torch.float32
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[3] + 0.2
    assert torch.allclose(encoder.encode(texts[1:2]), vectors[1:2], atol=1e-5)
    assert len(encoder.digest) == 64
