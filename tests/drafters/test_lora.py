"""Would catch: an adapter that copies its base's weights or changes them; one that is seen through
another drafter on the same base, while rows of several are decoded in turn; a fresh adapter that
already moves the law; gradients that reach the base or miss an adapter; a merge that changes the
law, or that writes into the base; adapters loaded onto other weights than they were trained on; an
export that PEFT reads as something else; names that adapt nothing in silence.

Saved and loaded, logits are equal bit for bit; so are those of a fresh adapter (B = 0) and of its
base, but for the head, whose sum has one more term. Merged and exported: 1e-5 of logits up to 20,
products summed in another order.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_drafters import (
    CUT,
    EOS,
    NUM_REAL_IDS,
    VOCAB_SIZE,
    answered,
    disturb,
    sampler,
    tiny_model,
    tiny_tokenizer,
)
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from decode import SpeculativeDecoder
from decode.resolve import resolve_drafter
from decode.targets.transformers import TransformersTarget
from decode.types import OFF, Choice, Request, Sampling, StepRecord
from drafters.base import BuildContext, TargetParts
from drafters.composite import CompositeConfig
from drafters.lm import LmConfig, LmDrafter
from drafters.lora import LoraConfig, LoraDrafter, from_pretrained, with_adapter
from drafters.ngram import NgramConfig

TEXT = torch.tensor([[5, 6, 7, 9, 11, 80, 3]])
ROW = TEXT[0].tolist()
LORA = LoraConfig(
    base="generic",
    rank=3,
    alpha=6.0,
    target_modules=["q_proj", "down_proj"],
    train_head=False,
    merged=False,
    init_seed=0,
)
EVERY = replace(LORA, target_modules=["all-linear"], train_head=True, alpha=4.5)
BASES = {
    "whole vocabulary": CUT,
    "draft vocabulary": replace(CUT, num_draft_vocab=70),
    "trained head": replace(CUT, num_draft_vocab=70, train_head=True),
}


def base_of(config: LmConfig, target: TargetParts) -> LmDrafter:
    """A base that is not merely a cut of the target any more."""
    base = config.build(BuildContext(target))
    if config.num_draft_vocab:
        base.set_draft_vocab(torch.arange(config.num_draft_vocab) * 2 + 3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in base.trainable.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return base


def adapted(base: LmDrafter, config: LoraConfig = LORA, seed: int | None = 1) -> LoraDrafter:
    """An adapter on the base; without a seed as it starts."""
    drafter = config.build(BuildContext(base.parts, parts={config.base: base}))
    if seed is not None:
        disturb(drafter, seed)
    return drafter


def logits_of(drafter: LmDrafter | LoraDrafter) -> torch.Tensor:
    with torch.no_grad():
        return drafter.widen(drafter.trainable(TEXT))


@pytest.fixture(params=sorted(BASES))
def base(request: pytest.FixtureRequest, target: TargetParts) -> LmDrafter:
    return base_of(BASES[request.param], target)


@pytest.mark.parametrize("config", [LORA, EVERY])
def test_it_starts_with_its_bases_law_and_leaves_it(base: LmDrafter, config: LoraConfig) -> None:
    fresh = adapted(base, config, seed=None)
    torch.testing.assert_close(logits_of(fresh), logits_of(base), atol=1e-6, rtol=0)
    moved = logits_of(adapted(base, config)) - logits_of(base)
    assert moved[moved.isfinite()].abs().max() > 0.1


def test_the_bases_tensors_are_shared(base: LmDrafter) -> None:
    drafters = [adapted(base, seed=seed) for seed in (1, 2, 3)]
    ours = {tensor.data_ptr() for tensor in base.trainable.parameters()}
    layers, hidden, inner, rank = 3, 32, 48, 3
    numbers = layers * rank * ((hidden + hidden) + (inner + hidden))  # q_proj and down_proj
    for drafter in drafters:
        theirs = {tensor.data_ptr() for tensor in drafter.trainable.parameters()}
        assert ours <= theirs
        assert len(theirs - ours) == layers * 2 * 2
        assert drafter.num_parameters == numbers
        assert drafter.memory_bytes == 4 * numbers
    embedding = base.parts.model.get_input_embeddings()
    assert all(drafter.trainable._frozen[0] is embedding for drafter in drafters)


def test_training_an_adapter_changes_nothing_else(base: LmDrafter) -> None:
    one, other = adapted(base, EVERY, seed=1), adapted(base, EVERY, seed=2)
    before = {n: t.clone() for n, t in base.trainable.state_dict().items()}
    flags = {n: p.requires_grad for n, p in base.trainable.named_parameters()}
    law, theirs = logits_of(base), logits_of(other)
    one.prepare_training()
    learning = {n: p for n, p in one.trainable.named_parameters() if p.requires_grad}
    assert len(learning) == len(one.adapted.own_tensors()) == 3 * 7 * 2 + 2
    optimizer = torch.optim.SGD(learning.values(), lr=1.0)
    one.trainable(TEXT).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learning.values())
    mine = logits_of(one)
    optimizer.step()
    assert not torch.equal(logits_of(one), mine)
    assert all(p.grad is None for p in base.trainable.parameters())
    assert {n: p.requires_grad for n, p in base.trainable.named_parameters()} == flags
    assert all(torch.equal(before[n], t) for n, t in base.trainable.state_dict().items())
    assert torch.equal(logits_of(base), law)
    assert torch.equal(logits_of(other), theirs)


def test_states_times_head_are_the_logits(base: LmDrafter) -> None:
    """Training computes its losses from the two, decoding from neither product in full."""
    network = adapted(base, EVERY).adapted
    assert network.splits
    states, head = network.states(TEXT), network.head_weight()
    torch.testing.assert_close(states @ head.T, network(TEXT), atol=1e-5, rtol=1e-5)
    (states @ head.T).logsumexp(-1).sum().backward()
    assert all(t.grad is not None for t in network.own_tensors().values())


def test_checkpointed_layers_give_the_same_gradients(base: LmDrafter) -> None:
    """The base is frozen, so nothing that enters the first layer asks for a gradient."""
    found = []
    for enabled in (False, True):
        network = adapted(base, EVERY).adapted
        network.checkpoint_layers(enabled)
        network(TEXT).logsumexp(-1).sum().backward()
        found.append([t.grad for t in network.own_tensors().values()])
    for plain, twice in zip(*found, strict=True):
        torch.testing.assert_close(twice, plain, atol=1e-5, rtol=1e-5)
        assert plain.abs().max() > 0


def test_rows_of_several_adapters_decode_in_turn(base: LmDrafter) -> None:
    """Sampled step by step in turn, each draws what it draws alone; scores in between too."""
    drafters = [base, *(adapted(base, EVERY, seed) for seed in (1, 2))]
    law = Sampling(temperature=0.9)

    def steps(number: int) -> list[list[int]]:
        """Drafts of a row that grows by its first draft, one list a step."""
        drafter, text = drafters[number], list(ROW)
        session, generator, found = drafter.open(), torch.Generator().manual_seed(number), []
        for _ in range(5):
            proposal = session.propose(text, 3, sampler(law, generator))
            assert proposal.source == ("lm" if number == 0 else "lora")
            found.append(proposal.token_ids)
            text += proposal.token_ids[:1]
        return found

    alone = [steps(number) for number in range(3)]
    sessions = [drafter.open() for drafter in drafters]
    generators = [torch.Generator().manual_seed(number) for number in range(3)]
    texts, together = [list(ROW) for _ in drafters], [[] for _ in drafters]
    answer = answered(base.parts, ROW, 8, Sampling())
    context = (answer.token_ids.tolist(), len(ROW), answer.logprobs, Sampling(), 3)
    scores = [drafter.score(*context) for drafter in drafters]
    for _ in range(5):
        for number, drafter in enumerate(drafters):
            proposal = sessions[number].propose(texts[number], 3, sampler(law, generators[number]))
            together[number].append(proposal.token_ids)
            texts[number] += proposal.token_ids[:1]
            again = drafters[(number + 1) % 3].score(*context)
            assert torch.equal(again.nan_to_num(-1), scores[(number + 1) % 3].nan_to_num(-1))
            assert drafter.device == base.device
    assert together == alone
    assert together[1] != together[2]


class Cycle:
    """A policy that asks another drafter at every step, rows out of phase."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.rows = names, 0

    def open(self, request: Request) -> "CycleSession":
        self.rows += 1
        return CycleSession(self.names, self.rows)


class CycleSession:
    def __init__(self, names: list[str], step: int) -> None:
        self.names, self.step = names, step

    def choose(self, offers: Mapping[str, int]) -> Choice:
        self.step += 1
        name = self.names[self.step % len(self.names)]
        return Choice(name, min(3, offers[name]), "in turn") if offers[name] else Choice(OFF, 0, "")

    def learn(self, record: StepRecord) -> None:
        pass


def test_one_decode_may_change_adapters_at_every_step(target: TargetParts) -> None:
    """Greedy text stays the target's; of four layers with small adapters, many drafts are kept."""
    base = replace(CUT, layers=[0, 1, 2, 3]).build(BuildContext(target))
    drafters: dict[str, LmDrafter | LoraDrafter] = {"base": base}
    for seed in (1, 2):
        drafters[f"a{seed}"] = replace(LORA, alpha=0.3).build(
            BuildContext(target, parts={"generic": base})
        )
        disturb(drafters[f"a{seed}"], seed)
    backend = TransformersTarget(target.model, target.tokenizer)
    prompts = [ROW, [3, 4], [*ROW, 1, 2]]
    plain = SpeculativeDecoder(backend).generate(prompts, 24)
    found = SpeculativeDecoder(backend, drafters, Cycle(list(drafters))).generate(prompts, 24)
    assert found.token_ids == plain.token_ids
    steps = [record for row in found.records for record in row]
    for name in drafters:
        kept = [r.num_accepted for r in steps if r.drafter == name]
        assert sum(kept) > 0
    assert any(r.num_accepted < r.num_drafted for r in steps if r.drafter != "base")


@pytest.mark.parametrize("config", [LORA, EVERY])
def test_merged_it_has_the_same_law(base: LmDrafter, config: LoraConfig) -> None:
    drafter = adapted(base, config)
    law, unmerged, before = logits_of(drafter), drafter.memory_bytes, logits_of(base)
    drafter.merge()
    torch.testing.assert_close(logits_of(drafter), law, atol=1e-5, rtol=0)
    assert torch.equal(logits_of(base), before)
    assert not any("lora" in name for name, _ in drafter.trainable.named_modules())
    copied = {t.data_ptr() for t in drafter.trainable.parameters()} - {
        t.data_ptr() for t in base.trainable.parameters()
    }
    layers = 3 * (2 if config is LORA else 7) + config.train_head
    assert len(copied) == layers
    assert drafter.memory_bytes > unmerged
    disturb(drafter, 7)  # merged copies stay as they are until what they come from is loaded again
    torch.testing.assert_close(logits_of(drafter), law, atol=1e-5, rtol=0)
    drafter.prepare_training()
    assert any(p.requires_grad for p in drafter.trainable.parameters())


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("config", [LORA, EVERY])
def test_saved_and_loaded_it_is_the_same(
    base: LmDrafter, config: LoraConfig, merged: bool, tmp_path: Path
) -> None:
    drafter = adapted(base, config)
    drafter.save(tmp_path / "code")
    parts = {"generic": base}
    again = replace(config, merged=merged, init_seed=9).build(
        BuildContext(base.parts, weights=tmp_path / "code", parts=parts)
    )
    assert (again.trainable is again.adapted) != merged
    torch.testing.assert_close(
        logits_of(again), logits_of(drafter), atol=1e-5 if merged else 0, rtol=0
    )
    stored = load_file(tmp_path / "code" / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == drafter.num_parameters
    again.save(tmp_path / "again")  # merged or not, the adapters themselves
    second = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(stored[name], second[name]) for name in stored)
    base.save(tmp_path / "generic")
    beside = from_pretrained(str(tmp_path / "code"), base.parts)
    assert torch.equal(logits_of(beside), logits_of(drafter))


def test_other_weights_of_the_base_are_refused(target: TargetParts, tmp_path: Path) -> None:
    base = base_of(CUT, target)
    adapted(base).save(tmp_path)
    other = base_of(CUT, target)
    with torch.no_grad():
        other.trainable.trunk.norm.weight[3] *= 1.01
    with pytest.raises(ValueError, match="other weights than those of generic here") as raised:
        LORA.build(BuildContext(target, weights=tmp_path, parts={"generic": other}))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_base_in_another_precision_is_the_same_base(
    target: TargetParts, tmp_path: Path, dtype: str
) -> None:
    """Trained in float32, saved, decoded in 16 bits, exported from there, read in float32 again."""
    base = base_of(replace(CUT, dtype="float32"), target)
    base.save(tmp_path / "generic")
    adapted(base).save(tmp_path / "code")
    low = replace(CUT, dtype=dtype).build(BuildContext(target, weights=tmp_path / "generic"))
    drafter = LORA.build(BuildContext(target, tmp_path / "code", {"generic": low}))
    assert {p.dtype for p in drafter.trainable.parameters()} == {getattr(torch, dtype)}
    assert drafter.trainable.trunk.rotary_emb.inv_freq.dtype == torch.float32
    low.save(tmp_path / "exported" / "generic")
    drafter.save(tmp_path / "exported" / "code")
    again = from_pretrained(str(tmp_path / "exported" / "code"), target)
    assert again.base.config.dtype == dtype
    drafter.prepare_training()
    assert {p.dtype for p in drafter.trainable.parameters()} == {torch.float32}
    assert next(low.trainable.parameters()).dtype == getattr(torch, dtype)


def test_training_is_in_float32_whatever_the_target_is() -> None:
    """A target in bfloat16 lends its head, which stays as it is; what is learned is not rounded."""
    parts = TargetParts(tiny_model().bfloat16(), tiny_tokenizer(), VOCAB_SIZE, "tiny")
    for config in (CUT, replace(CUT, num_draft_vocab=70), replace(CUT, dtype="float32")):
        base = base_of(config, parts)
        drafter = adapted(base, EVERY)
        low = logits_of(drafter)
        drafter.prepare_training()
        learning = {p.dtype for p in drafter.trainable.parameters() if p.requires_grad}
        assert learning == {torch.float32}
        network = drafter.adapted
        assert network.head_weight().dtype == torch.float32
        product = network.states(TEXT) @ network.head_weight().T
        torch.testing.assert_close(network(TEXT).float(), product, atol=0.2, rtol=0.02)  # bfloat16
        torch.testing.assert_close(logits_of(drafter), low, atol=0.4, rtol=0.05)
        network(TEXT).float().logsumexp(-1).sum().backward()
        assert all(t.grad is not None for t in network.own_tensors().values())
        assert next(parts.model.parameters()).dtype == torch.bfloat16
        drafter.merge()
        assert {p.dtype for p in drafter.trainable.parameters()} == {torch.float32}


@pytest.mark.parametrize("changes", [{"rank": 2}, {"alpha": 1.0}, {"target_modules": ["q_proj"]}])
def test_other_settings_are_refused(
    target: TargetParts, tmp_path: Path, changes: dict[str, object]
) -> None:
    base = base_of(CUT, target)
    adapted(base).save(tmp_path)
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(LORA, **changes).build(BuildContext(target, tmp_path, {"generic": base}))
    with pytest.raises(ValueError, match="describes kind 'lora'"):
        CUT.build(BuildContext(target, weights=tmp_path))


def test_without_its_base_beside_it_an_adapter_is_refused(
    target: TargetParts, tmp_path: Path
) -> None:
    adapted(base_of(CUT, target)).save(tmp_path / "code")
    with pytest.raises(ValueError, match="adapters for generic, which is neither in"):
        from_pretrained(str(tmp_path / "code"), target)


@pytest.mark.parametrize("config", [LORA, EVERY])
def test_exported_it_is_a_whole_model_and_an_adapter(
    base: LmDrafter, config: LoraConfig, tmp_path: Path
) -> None:
    drafter = adapted(base, config)
    base.export_pretrained(tmp_path / "base")
    drafter.export_pretrained(tmp_path / "whole")
    drafter.export_adapter(tmp_path / "adapter", base="../base")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    on_base = with_adapter(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    ours = logits_of(drafter)
    known = ours.isfinite()
    with torch.no_grad():
        for model in (whole, on_base):
            torch.testing.assert_close(model(TEXT).logits[known], ours[known], atol=1e-5, rtol=1e-5)
        elsewhere = ~known & (torch.arange(VOCAB_SIZE) < NUM_REAL_IDS)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        if not config.train_head and elsewhere.any():
            assert not torch.equal(on_base(TEXT).logits[elsewhere], plain(TEXT).logits[elsewhere])
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 3
    assert settings["base_model_name_or_path"] == "../base"
    assert settings["target_modules"] == sorted(settings["target_modules"])
    assert ("lm_head" in settings["target_modules"]) == config.train_head


def test_an_adapter_with_a_tensor_too_few_is_noticed(target: TargetParts, tmp_path: Path) -> None:
    base = base_of(CUT, target)
    base.export_pretrained(tmp_path / "base")
    adapted(base).export_adapter(tmp_path / "adapter", base="")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors[min(tensors)]
    save_file(tensors, path, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="an adapter that does not fit the model"):
        with_adapter(model, tmp_path / "adapter")


def test_a_whole_model_of_another_family_can_be_adapted(
    target: TargetParts, tmp_path: Path
) -> None:
    """GPT-2 keeps its matrices the other way round, and ties its head to its embedding."""
    torch.manual_seed(0)
    settings = {"vocab_size": VOCAB_SIZE, "n_positions": 64, "n_embd": 32, "n_layer": 2}
    GPT2LMHeadModel(
        GPT2Config(**settings, n_head=4, initializer_range=0.3, bos_token_id=1, eos_token_id=EOS)
    ).save_pretrained(tmp_path / "gpt")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt")
    source = LmConfig(
        source=str(tmp_path / "gpt"), layers=[], num_draft_vocab=0, train_head=False, dtype="auto"
    )
    base = source.build(BuildContext(target))
    config = replace(EVERY, train_head=False)
    drafter = adapted(base, config)
    assert len(drafter.adapted.own_tensors()) == 2 * 4 * 2
    law = logits_of(drafter)
    assert not torch.allclose(law, logits_of(base))
    drafter.export_pretrained(tmp_path / "whole")
    drafter.export_adapter(tmp_path / "adapter", base="")
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
        with_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "gpt"), tmp_path / "adapter"),
    ]
    with torch.no_grad():
        for model in models:
            found = model(TEXT).logits
            torch.testing.assert_close(
                found[..., :NUM_REAL_IDS], law[..., :NUM_REAL_IDS], atol=1e-5, rtol=1e-5
            )
    drafter.merge()
    torch.testing.assert_close(logits_of(drafter), law, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="train_head=true cannot be had on a whole gpt2 model"):
        adapted(base, EVERY)


def test_adapters_start_alike_whatever_was_drawn_before(target: TargetParts) -> None:
    base = base_of(CUT, target)
    state = torch.random.get_rng_state()
    one = adapted(base, EVERY, seed=None).adapted.own_tensors()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    two = adapted(base, EVERY, seed=None).adapted.own_tensors()
    three = adapted(base, replace(EVERY, init_seed=1), seed=None).adapted.own_tensors()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], three[name]) for name in one if "lora_A" in name)
    assert not any(tensor.any() for name, tensor in one.items() if "lora_B" in name)
    values = torch.cat([t.detach().flatten() for name, t in one.items() if "q_proj.lora_A" in name])
    assert values.abs().max() <= 32**-0.5
    assert values.std() == pytest.approx((32 * 3) ** -0.5, rel=0.15)  # uniform; 288 of them


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 0}, "rank=0"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"target_modules": []}, "adapts nothing"),
        (
            {"target_modules": ["q_proj", "qkv"]},
            "names qkv, but the base has no such linear layer; it has down_proj, gate_proj, k_proj",
        ),
        ({"target_modules": ["lm_head"]}, "names lm_head"),
        ({"target_modules": ["all-linear", "qkv"]}, "names qkv"),
        ({"base": "nobody"}, "needs the pool entry 'nobody', which is not among"),
        ({"base": "lookup"}, "base=lookup is a NgramDrafter"),
        ({"base": "both"}, "base=both is a CompositeDrafter"),
        ({"base": "other"}, "base=other is a LoraDrafter"),
    ],
)
def test_what_cannot_be_is_refused(
    target: TargetParts, changes: dict[str, object], words: str
) -> None:
    base = base_of(CUT, target)
    lookup = NgramConfig(min_ngram=1, max_ngram=3, max_offer=5).build(BuildContext(target))
    parts = {"generic": base, "lookup": lookup, "other": adapted(base)}
    both = CompositeConfig(lookup="lookup", model="generic", min_match=2)
    parts["both"] = both.build(BuildContext(target, parts=parts))
    with pytest.raises(ValueError, match=words) as raised:
        replace(LORA, **changes).build(BuildContext(target, parts=parts))
    assert "\n" not in str(raised.value)


def test_it_has_no_vocabulary_of_its_own(target: TargetParts) -> None:
    drafter = adapted(base_of(BASES["draft vocabulary"], target))
    assert drafter.num_draft_vocab == 0
    assert drafter.draft_ids is not None
    assert len(drafter.draft_ids) == 70
    with pytest.raises(ValueError, match="kind lora, which chooses none of its own"):
        drafter.set_draft_vocab(torch.arange(70))


def test_a_composite_may_ask_it(target: TargetParts) -> None:
    drafter = adapted(base_of(CUT, target))
    lookup = NgramConfig(min_ngram=1, max_ngram=3, max_offer=5).build(BuildContext(target))
    both = CompositeConfig(lookup="lookup", model="code", min_match=2).build(
        BuildContext(target, parts={"lookup": lookup, "code": drafter})
    )
    proposal = both.open().propose([5, 6, 7, 9, 11], 3, sampler(Sampling()))
    assert proposal.source == "code"
    alone = drafter.open().propose([5, 6, 7, 9, 11], 3, sampler(Sampling()))
    assert proposal.token_ids == alone.token_ids


def test_its_folder_is_found_by_kind(target: TargetParts, tmp_path: Path) -> None:
    base = base_of(CUT, target)
    base.save(tmp_path / "generic" / "own")
    drafter = adapted(base)
    drafter.save(tmp_path / "code" / "own")
    found = resolve_drafter(tmp_path / "code" / "own", target)  # type: ignore[arg-type]
    assert isinstance(found, LoraDrafter)
    assert torch.equal(logits_of(found), logits_of(drafter))


def test_peft_is_not_loaded_before_it_is_needed() -> None:
    code = "import sys, drafters.lora, pipeline.export; sys.exit('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_target_has_another_cut(tmp_path: Path) -> None:
    """The base is cut from its target, so an adapter is tied to the target as well."""
    one, other = (
        TargetParts(tiny_model(seed=seed), tiny_tokenizer(), VOCAB_SIZE, "tiny") for seed in (0, 1)
    )
    adapted(CUT.build(BuildContext(one))).save(tmp_path)
    base = CUT.build(BuildContext(other))
    with pytest.raises(ValueError, match="other weights"):
        LORA.build(BuildContext(other, tmp_path, {"generic": base}))
