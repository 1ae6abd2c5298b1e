"""Would catch: proposals outside the draft vocabulary or in padding columns; a vocabulary that
loses the end of a turn; a cut that trains the target's layers, copies its embedding, or sends
gradients into it; a drafter with another tokenizer let in; an offer beyond the drafter's own
context; a score that forgets the penalty.

Tolerance 1e-4 on logits: float32 rounding between one pass and several (seen: 3e-6); a law may
differ by as much relatively.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_drafters import (
    CUT,
    EOS,
    NUM_REAL_IDS,
    VOCAB_SIZE,
    answered,
    sampler,
    tiny_model,
    tiny_tokenizer,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from decode.types import MAX_DRAFT_TOKENS, Sampling
from drafters.base import BuildContext, TargetParts
from drafters.lm import LmConfig, LmDrafter, from_pretrained
from drafters.vocabulary import choose_draft_ids, count_tokens

TEXT = [5, 6, 7, 9, 11, 80, 3]
WHOLE = LmConfig(source="", layers=[], num_draft_vocab=0, train_head=False, dtype="auto")


def folder_of(model: torch.nn.Module, folder: Path, tokenizer: object = None) -> str:
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return str(folder)


def build(config: LmConfig, target: TargetParts) -> LmDrafter:
    return config.build(BuildContext(target))


def rows(drafter: LmDrafter, text: list[int], num: int = 4) -> torch.Tensor:
    spy = sampler(Sampling(temperature=1.0), torch.Generator().manual_seed(0))
    drafter.open().propose(text, num, spy)
    return torch.stack(spy.rows)


def test_all_layers_cut_are_the_target_itself(target: TargetParts) -> None:
    drafter = build(replace(CUT, layers=[0, 1, 2, 3]), target)
    spy = sampler(Sampling(temperature=1.0), torch.Generator().manual_seed(0))
    tokens = drafter.open().propose(TEXT, 5, spy).token_ids
    with torch.no_grad():
        wanted = target.model(torch.tensor([TEXT + tokens[:-1]])).logits[0, len(TEXT) - 1 :]
    found = torch.stack(spy.rows)
    torch.testing.assert_close(found[:, :NUM_REAL_IDS], wanted[:, :NUM_REAL_IDS], atol=1e-4, rtol=0)
    assert found[:, NUM_REAL_IDS:].isneginf().all()


def test_layers_are_chosen_in_order_and_from_the_end(target: TargetParts) -> None:
    named = build(replace(CUT, layers=[0, 1, 3]), target)
    from_end = build(replace(CUT, layers=[0, 1, -1]), target)
    other = build(replace(CUT, layers=[1, 0, 3]), target)
    assert torch.equal(rows(named, TEXT), rows(from_end, TEXT))
    assert not torch.allclose(rows(named, TEXT), rows(other, TEXT))
    with pytest.raises(ValueError, match="it has 4"):
        build(replace(CUT, layers=[0, 4]), target)


def small(config_class: type, model_class: type, **settings: object) -> TargetParts:
    """A four-layer target of another family."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
    config = config_class(
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS,
        initializer_range=0.25,
        **shape,
        **heads,
        **settings,
    )
    return TargetParts(model_class(config).eval(), tiny_tokenizer(), VOCAB_SIZE, "tiny")


WINDOWS = {
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 4,
}


@pytest.mark.parametrize(
    ("config_class", "model_class", "settings"),
    [
        (MistralConfig, MistralForCausalLM, {"sliding_window": 5}),
        (Qwen3Config, Qwen3ForCausalLM, {"layer_types": ["full_attention"] * 4}),
        (Qwen3Config, Qwen3ForCausalLM, WINDOWS),
    ],
)
def test_families_with_windows_are_cut_and_rolled_back(
    config_class: type, model_class: type, settings: dict[str, object]
) -> None:
    """A window shorter than the text, and a text that shrinks and grows across it."""
    parts = small(config_class, model_class, **settings)
    session = build(replace(CUT, layers=[0, 1, 2, 3]), parts).open()
    for text in (TEXT * 2, TEXT * 2 + [1, 2], TEXT, TEXT[:3], TEXT * 3):
        spy = sampler(Sampling())
        session.propose(text, 3, spy)
        with torch.no_grad():
            wanted = parts.model(torch.tensor([text + spy.drawn[:-1]])).logits[0, len(text) - 1 :]
        torch.testing.assert_close(
            torch.stack(spy.rows)[:, :NUM_REAL_IDS], wanted[:, :NUM_REAL_IDS], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(("layers", "reaches"), [([0, 2], True), ([1, 3], False)])
def test_a_layer_keeps_its_kind_of_attention(layers: list[int], reaches: bool) -> None:
    """Two windows of four tokens see seven back at most; full attention sees all."""
    drafter = build(replace(CUT, layers=layers), small(Qwen3Config, Qwen3ForCausalLM, **WINDOWS))
    one, other = rows(drafter, [1, *TEXT * 2], 1), rows(drafter, [2, *TEXT * 2], 1)
    assert torch.equal(one, other) != reaches


def test_a_draft_vocabulary_has_the_targets_rows_and_no_law_outside(target: TargetParts) -> None:
    whole = build(CUT, target)
    for train_head in (False, True):
        part = build(replace(CUT, num_draft_vocab=70, train_head=train_head), target)
        assert part.draft_ids is not None
        outside = torch.ones(VOCAB_SIZE, dtype=torch.bool)
        outside[part.draft_ids] = False
        found, wanted = rows(part, TEXT, 1), rows(whole, TEXT, 1)
        assert found[:, outside].isneginf().all()
        torch.testing.assert_close(
            found[:, part.draft_ids], wanted[:, part.draft_ids], atol=1e-5, rtol=0
        )


def test_draft_ids_hold_special_tokens_then_the_most_frequent() -> None:
    counts = count_tokens([torch.tensor([9, 9, 9, 4, 4, 120]), torch.tensor([120, 4])], 160)
    assert counts[[4, 9, 120]].tolist() == [3, 3, 2]
    assert count_tokens([], 160).tolist() == [0] * 160
    ids = choose_draft_ids(5, NUM_REAL_IDS, {EOS}, counts)
    assert ids.tolist() == [0, 4, 9, 120, EOS]
    assert choose_draft_ids(3, NUM_REAL_IDS, {EOS}).tolist() == [0, 1, EOS]
    padding = torch.zeros(160, dtype=torch.long)
    padding[155] = 10**6
    assert choose_draft_ids(2, NUM_REAL_IDS, {EOS, 158}, padding).tolist() == [0, EOS]
    for impossible in (1, NUM_REAL_IDS + 1):
        with pytest.raises(ValueError, match="num_draft_vocab"):
            choose_draft_ids(impossible, NUM_REAL_IDS, {EOS, 3})


def test_special_tokens_are_always_in_a_draft_vocabulary(target: TargetParts) -> None:
    drafter = build(replace(CUT, num_draft_vocab=8), target)
    assert drafter.draft_ids is not None
    assert set(range(146, 150)) <= set(drafter.draft_ids.tolist())
    with pytest.raises(ValueError, match="num_draft_vocab=8"):
        drafter.set_draft_vocab(torch.tensor([1, 1, 2, 3, 4, 5, 6, 7]))


def test_what_is_shared_is_neither_counted_nor_trained(target: TargetParts) -> None:
    whole = build(CUT, target)
    part = build(replace(CUT, num_draft_vocab=70, train_head=True), target)
    inner = target.model.model
    copied = sum(p.numel() for i in (0, 1, 3) for p in inner.layers[i].parameters()) + 32
    assert whole.num_parameters == copied
    assert part.num_parameters == copied + 70 * 32
    assert part.memory_bytes == 4 * part.num_parameters
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    for parameter in part.trainable.parameters():
        parameter.data.add_(1.0)
    after = target.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_head_is_trained_only_when_asked(target: TargetParts) -> None:
    for train_head in (False, True):
        for size in (0, 70):
            config = replace(CUT, num_draft_vocab=size, train_head=train_head)
            network = build(config, target).trainable
            names = {name for name, p in network.named_parameters() if p.requires_grad}
            assert ("head" in names) == train_head
            logits = network(torch.tensor([TEXT]), torch.ones(1, len(TEXT)))
            assert logits.shape == (1, len(TEXT), size or VOCAB_SIZE)
            logits.logsumexp(-1).sum().backward()
            assert all(p.grad is not None for p in network.parameters() if p.requires_grad)
    assert all(p.grad is None for p in target.model.parameters())


def test_padding_of_a_batch_changes_nothing(cut: LmDrafter) -> None:
    alone = cut.trainable(torch.tensor([TEXT]))[0]
    ids = torch.tensor([[*TEXT, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
    mask = torch.tensor([[1] * len(TEXT) + [0, 0], [1] * 9])
    keep = mask.bool() & torch.tensor([[True], [False]])
    torch.testing.assert_close(cut.trainable(ids, mask, keep), alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("columns", "target_columns"), [(176, 160), (160, 176), (150, 160)])
def test_a_vocabulary_that_differs_in_padding_only_works(
    tmp_path: Path, columns: int, target_columns: int
) -> None:
    source = folder_of(tiny_model(columns, seed=1), tmp_path)
    parts = TargetParts(tiny_model(target_columns), tiny_tokenizer(), target_columns, "tiny")
    drafter = from_pretrained(source, parts)
    found = rows(drafter, TEXT)
    assert found.shape == (4, target_columns)
    assert found[:, :NUM_REAL_IDS].isfinite().all()
    assert found[:, NUM_REAL_IDS:].isneginf().all()


def test_another_tokenizer_is_refused(tmp_path: Path, target: TargetParts) -> None:
    source = folder_of(tiny_model(), tmp_path / "word", tiny_tokenizer("unheard"))
    with pytest.raises(ValueError, match="'unheard' is id 145 there and None in the target"):
        from_pretrained(source, target)
    other = tiny_tokenizer()
    other.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|extra|>"]})
    source = folder_of(tiny_model(), tmp_path / "special", other)
    with pytest.raises(ValueError, match="another tokenizer"):
        from_pretrained(source, target)


def test_a_source_without_tokenizer_or_weights_is_refused(
    tmp_path: Path, target: TargetParts
) -> None:
    tiny_model().save_pretrained(tmp_path / "bare")
    tiny_tokenizer().save_pretrained(tmp_path / "hollow")
    for name, reason in (("bare", "no tokenizer"), ("hollow", "no causal LM"), ("none", "no tok")):
        with pytest.raises(ValueError, match=reason) as raised:
            from_pretrained(str(tmp_path / name), target)
        assert "\n" not in str(raised.value)


def test_too_few_columns_are_refused(tmp_path: Path, target: TargetParts) -> None:
    source = folder_of(tiny_model(149), tmp_path)
    with pytest.raises(ValueError, match="149 logits, fewer than the 150"):
        from_pretrained(source, target)


def test_any_other_family_drafts_whole_but_cannot_be_cut(
    tmp_path: Path, target: TargetParts
) -> None:
    torch.manual_seed(0)
    settings = {"vocab_size": VOCAB_SIZE, "n_positions": 64, "n_embd": 32, "n_layer": 2}
    model = GPT2LMHeadModel(
        GPT2Config(**settings, n_head=4, initializer_range=0.3, bos_token_id=1, eos_token_id=EOS)
    ).eval()
    drafter = from_pretrained(folder_of(model, tmp_path), target)
    session = drafter.open()
    for text in (TEXT, [*TEXT, 4], TEXT[:2]):
        spy = sampler(Sampling())
        session.propose(text, 3, spy)
        with torch.no_grad():
            wanted = model(torch.tensor([text + spy.drawn[:-1]])).logits[0, len(text) - 1 :, :150]
        torch.testing.assert_close(torch.stack(spy.rows)[:, :150], wanted, atol=1e-4, rtol=0)
    assert drafter.max_context == 64
    gpt = TargetParts(model, tiny_tokenizer(), VOCAB_SIZE, "gpt")
    with pytest.raises(ValueError, match="GPT2LMHeadModel, which cannot be taken apart"):
        build(CUT, gpt)
    with pytest.raises(ValueError, match="cannot be taken apart"):
        build(replace(WHOLE, source=str(tmp_path), num_draft_vocab=50), target)


def test_a_source_may_be_cut_and_given_a_draft_vocabulary(
    tmp_path: Path, target: TargetParts
) -> None:
    source = folder_of(tiny_model(176, seed=1), tmp_path)
    config = replace(WHOLE, source=source, layers=[0, -1], num_draft_vocab=60, train_head=True)
    drafter = build(config, target)
    assert len(rows(drafter, TEXT)[0].isfinite().nonzero()) == 60
    frozen = [name for name, p in drafter.trainable.named_parameters() if not p.requires_grad]
    assert frozen == ["embedding.weight"]  # tied with the full head


def test_it_offers_what_its_context_has_room_for(cut: LmDrafter) -> None:
    """96 positions: k drafts after T tokens read T + k - 1."""
    session = cut.open()
    assert session.offer([]) == 0
    assert session.offer([1] * 20) == MAX_DRAFT_TOKENS
    for length, room in ((94, 3), (96, 1), (97, 0), (120, 0)):
        text = [1 + i % 7 for i in range(length)]
        assert session.offer(text) == room
        assert len(session.propose(text, 5, sampler(Sampling())).token_ids) == room
    accept = cut.score([1 + i % 7 for i in range(110)], 90, torch.zeros(20), Sampling(), 2)
    assert accept[:6].isfinite().all()
    assert accept[6, 0].isfinite()
    assert accept[7:].isnan().all()


@pytest.mark.parametrize("num_prompt_tokens", [0, 1, 9, 10])
def test_score_at_the_edges(cut: LmDrafter, num_prompt_tokens: int) -> None:
    """Without a prompt the first token has no context; an empty answer has no rows."""
    text = [1 + i for i in range(10)]
    logprobs = torch.full((10 - num_prompt_tokens,), -1.0)
    accept = cut.score(text, num_prompt_tokens, logprobs, Sampling(temperature=1.0), 3)
    assert accept.shape == (10 - num_prompt_tokens, 3)
    assert accept[: 1 if num_prompt_tokens == 0 else 0, 0].isnan().all()
    assert accept[1:, 0].isfinite().all()


def test_score_applies_the_penalty_to_prompt_and_answer(cut: LmDrafter) -> None:
    text, law = [5, 6, 7, 5, 8, 6, 9], Sampling(temperature=0.9, repetition_penalty=1.6)
    logprobs = torch.full((5,), -0.5)
    accept = cut.score(text, 2, logprobs, law, 1)[:, 0]
    with torch.no_grad():
        logits = cut.widen(cut.trainable(torch.tensor([text])))[0].double()
    for i in range(5):
        row = logits[1 + i].clone()
        for token in set(text[: 2 + i]):
            row[token] = row[token] / 1.6 if row[token] > 0 else row[token] * 1.6
        prob = (row / 0.9).softmax(-1)[text[2 + i]].item()
        assert accept[i].item() == pytest.approx(min(1.0, prob / 2.718281828**-0.5), rel=1e-4)


def test_tests_see_both_hits_and_misses(cut: LmDrafter, target: TargetParts) -> None:
    """The cut agrees with its target sometimes, so equalities of scores are not empty."""
    answer = answered(target, TEXT, 30, Sampling())
    accept = cut.score(answer.token_ids.tolist(), len(TEXT), answer.logprobs, Sampling(), 1)
    assert 0.05 < accept.mean() < 0.95


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"layers": []}, {"num_draft_vocab": -1}])
def test_impossible_settings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(CUT, **changes)


def test_bfloat16_keeps_rotary_frequencies(target: TargetParts) -> None:
    drafter = build(replace(CUT, dtype="bfloat16"), target)
    network = drafter.trainable
    assert network.trunk.rotary_emb.inv_freq.dtype == torch.float32
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    assert rows(drafter, TEXT).dtype == torch.float32
