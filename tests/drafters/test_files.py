"""Would catch: shared tensors written to disk; a draft vocabulary that comes back in another order;
a damaged, truncated or foreign file that loads; an exported model with other
logits than the drafter's; half-written files that look finished; tied weights stored twice or lost.

Saved and loaded, logits are equal bit for bit. Exported and loaded by transformers, they agree to
1e-5: the same numbers in a product of another width.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_drafters import CUT, EOS, VOCAB_SIZE, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from drafters.base import BuildContext, TargetParts
from drafters.lm import LmConfig, LmDrafter, from_pretrained

CONFIGS = [
    replace(CUT, num_draft_vocab=size, train_head=train_head)
    for size in (0, 70)
    for train_head in (False, True)
]
TEXT = torch.tensor([[5, 6, 7, 9, 11, 80, 3]])


def logits_of(drafter: LmDrafter) -> torch.Tensor:
    with torch.no_grad():
        return drafter.trainable(TEXT)


def trained(config: LmConfig, target: TargetParts) -> LmDrafter:
    """A drafter whose every trained number, and draft vocabulary, differs from a fresh one's."""
    drafter = config.build(BuildContext(target))
    if config.num_draft_vocab:
        drafter.set_draft_vocab(torch.arange(149, 149 - config.num_draft_vocab, -1))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.trainable.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return drafter


@pytest.mark.parametrize("config", CONFIGS)
def test_saved_and_loaded_it_is_the_same(
    config: LmConfig, target: TargetParts, tmp_path: Path
) -> None:
    drafter = trained(config, target)
    drafter.save(tmp_path)
    for again in (
        config.build(BuildContext(target, weights=tmp_path)),
        from_pretrained(str(tmp_path), target),
    ):
        assert torch.equal(logits_of(again), logits_of(drafter))
        if config.num_draft_vocab:
            assert torch.equal(again.draft_ids, drafter.draft_ids)
    stored = load_file(tmp_path / "model.safetensors")
    floats = sum(t.numel() for t in stored.values() if t.is_floating_point())
    trained_here = sum(p.numel() for p in drafter.trainable.parameters())
    assert floats == trained_here
    assert not any("embed" in name for name in stored)
    assert {f.name for f in tmp_path.iterdir()} == {"drafter.json", "model.safetensors"}


@pytest.mark.parametrize("config", CONFIGS)
def test_exported_it_is_a_whole_hugging_face_model(
    config: LmConfig, target: TargetParts, tmp_path: Path
) -> None:
    drafter = trained(config, target)
    drafter.export_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tiny_tokenizer().get_vocab()
    with torch.no_grad():
        theirs = model(TEXT).logits
    ids = torch.arange(VOCAB_SIZE) if drafter.draft_ids is None else drafter.draft_ids
    torch.testing.assert_close(theirs[..., ids], logits_of(drafter), atol=1e-5, rtol=0)
    elsewhere = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    elsewhere[ids] = False
    head = target.model.lm_head.weight
    assert torch.equal(model.lm_head.weight[elsewhere], head[elsewhere])
    assert model.config.tie_word_embeddings is False  # else some loaders drop the head
    assert torch.equal(model.model.embed_tokens.weight, target.model.model.embed_tokens.weight)
    again = from_pretrained(str(tmp_path), target)
    torch.testing.assert_close(
        again.widen(logits_of(again)), drafter.widen(logits_of(drafter)), atol=1e-5, rtol=0
    )


def test_a_whole_model_of_another_family_keeps_its_tied_head(
    target: TargetParts, tmp_path: Path
) -> None:
    settings = {"vocab_size": VOCAB_SIZE, "n_positions": 64, "n_embd": 32, "n_layer": 2}
    GPT2LMHeadModel(
        GPT2Config(**settings, n_head=4, bos_token_id=1, eos_token_id=EOS)
    ).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    config = LmConfig(
        source=str(tmp_path / "source"),
        layers=[],
        num_draft_vocab=0,
        train_head=False,
        dtype="auto",
    )
    drafter = trained(config, target)
    drafter.save(tmp_path / "own")
    assert "model.lm_head.weight" not in load_file(tmp_path / "own" / "model.safetensors")
    again = config.build(BuildContext(target, weights=tmp_path / "own"))
    assert torch.equal(logits_of(again), logits_of(drafter))
    drafter.export_pretrained(tmp_path / "whole")
    exported = from_pretrained(str(tmp_path / "whole"), target)
    assert torch.equal(logits_of(exported), logits_of(drafter))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "other"])
def test_damaged_weights_are_refused(target: TargetParts, tmp_path: Path, damage: str) -> None:
    trained(CONFIGS[0], target).save(tmp_path)
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
    path.write_bytes(content[: 100 if damage == "truncate" else None])
    if damage == "remove":
        path.unlink()
    if damage == "other":
        CONFIGS[0].build(BuildContext(target)).save(tmp_path / "fresh")
        path.write_bytes((tmp_path / "fresh" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"model\.safetensors") as raised:
        CONFIGS[0].build(BuildContext(target, weights=tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": [0, 2, -1]}, "layers"),
        ({"num_draft_vocab": 60}, "num_draft_vocab"),
        ({"train_head": True}, "train_head"),
    ],
)
def test_other_settings_are_refused(
    target: TargetParts, tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    trained(CONFIGS[2], target).save(tmp_path)
    with pytest.raises(ValueError, match=named):
        replace(CONFIGS[2], **changes).build(BuildContext(target, weights=tmp_path))


def test_a_target_of_another_size_is_refused(target: TargetParts, tmp_path: Path) -> None:
    trained(CONFIGS[0], target).save(tmp_path)
    parts = TargetParts(tiny_model(176), tiny_tokenizer(), 176, "tiny")
    with pytest.raises(ValueError, match="vocab_size=160"):
        CONFIGS[0].build(BuildContext(parts, weights=tmp_path))


@pytest.mark.parametrize("text", ["{", '{"kind": "eagle", "format_version": 1}', "{}", "[]"])
def test_a_description_that_cannot_be_read_is_refused(
    target: TargetParts, tmp_path: Path, text: str
) -> None:
    trained(CONFIGS[0], target).save(tmp_path)
    (tmp_path / "drafter.json").write_text(text)
    with pytest.raises(ValueError, match=r"drafter\.json"):
        CONFIGS[0].build(BuildContext(target, weights=tmp_path))
    (tmp_path / "drafter.json").unlink()
    with pytest.raises(ValueError, match=r"drafter\.json does not exist"):
        CONFIGS[0].build(BuildContext(target, weights=tmp_path))


def test_a_save_that_dies_leaves_the_old_drafter(
    target: TargetParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = trained(CONFIGS[0], target)
    old.save(tmp_path)

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("drafters.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        CONFIGS[0].build(BuildContext(target)).save(tmp_path)
    again = CONFIGS[0].build(BuildContext(target, weights=tmp_path))
    assert torch.equal(logits_of(again), logits_of(old))


def test_the_description_holds_plain_settings(target: TargetParts, tmp_path: Path) -> None:
    trained(CONFIGS[3], target).save(tmp_path)
    stored = json.loads((tmp_path / "drafter.json").read_text())
    assert stored["kind"] == "lm"
    assert LmConfig(**stored["config"]) == CONFIGS[3]
