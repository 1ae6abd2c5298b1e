"""Bugs these tests would catch: a drafter's law that is another one in the kernels' forward than on
its modules (a layer, bias, window or norm left out, a head of other rows, padding that gets a law);
a roll-back that leaves the cache wrong; logits under ids that are not theirs; weights of yesterday
after training, or a new forward, with an empty cache, while nothing has changed; a composite with a
model of its own; a target's weights copied for a drafter; modules that drafting has changed;
something that cannot draft there and is run all the same, or is said not to at every step.

Tolerance, relative to the largest logit: 1e-4 in float32 (seen: 1e-6). Kernels run in Triton's
interpreter where there is no GPU, so texts are short.
"""

import copy
import logging
from typing import Any

import pytest
import torch
from native_models import FAMILIES, VOCAB_SIZE, build, family, ids, relative
from tiny_drafters import sampler, tiny_tokenizer
from torch import Tensor

from decode.device.parts import DeviceDrafter, DeviceLookup, DeviceModel, DeviceParts
from decode.native import static_cache
from decode.native.target import NativeTarget
from decode.types import Sampling
from drafters.base import BuildContext, TargetParts, target_parts
from drafters.composite import CompositeConfig, CompositeDrafter
from drafters.lm import LmConfig, LmDrafter
from drafters.lora import LoraConfig
from drafters.networks import CutNetwork, WholeNetwork
from drafters.ngram import NgramConfig, NgramDrafter

TOLERANCE = 1e-4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAFT_IDS = torch.arange(1, 41, 2)
HEADS = {"whole": (0, False), "gathered": (20, False), "trained": (20, True)}
UNTIED = "llama, biases, untied, no groups"
QUICK = ("llama", UNTIED, "qwen2", "qwen3")  # the rest where there is time
CASES = [
    pytest.param(
        name,
        head,
        marks=[] if name in QUICK and (head == "trained" or name == "llama") else pytest.mark.slow,
    )
    for name in FAMILIES
    for head in HEADS
]
ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk of keys, so that no program runs for nothing."""
    monkeypatch.setattr(static_cache, "FIRST_CAPACITY", 128)


def parts_of(model: Any, vocab_size: int = VOCAB_SIZE) -> TargetParts:
    return TargetParts(model.to(DEVICE), tiny_tokenizer(), vocab_size, "small")


def cut(model: Any, head: str = "trained", parts: TargetParts | None = None) -> LmDrafter:
    """Two layers; a trained head, where there is one, is not the model's."""
    parts = parts or parts_of(model)
    size, train_head = HEADS[head]
    config = LmConfig(
        source=None, layers=[0, -1], num_draft_vocab=size, train_head=train_head, dtype="auto"
    )
    dtype = next(model.parameters()).dtype
    network = CutNetwork(model, [0, -1], train_head=train_head, dtype=dtype, shared=True)
    drafter = LmDrafter(config, network, parts)
    if size:
        drafter.set_draft_vocab(DRAFT_IDS.to(DEVICE))
    if network.head is not None:
        with torch.no_grad():
            network.head.add_(0.1 * torch.randn_like(network.head))
    return drafter


def whole(model: Any, vocab_size: int, num_real_ids: int) -> LmDrafter:
    """A model of its own beside a target that has so many columns and tokens."""
    config = LmConfig(source="m", layers=[], num_draft_vocab=0, train_head=False, dtype="auto")
    model = model.to(DEVICE)
    network = CutNetwork(model, [], train_head=False, dtype=torch.float32, shared=False)
    drafter = LmDrafter(config, network, parts_of(model, vocab_size))
    drafter.num_real_ids = num_real_ids
    return drafter


def model_of(drafter: Any) -> DeviceModel:
    parts = drafter.on_device()
    assert parts.lookup is None
    return parts.model


@torch.inference_mode()
def read(model: DeviceModel, vocab_size: int, text: list[int]) -> Tensor:  # [4, V]
    """A prompt, one token, three tokens, and one after forgetting two, in the target's columns."""
    row, n = model.forward.open(), len(text) - 5
    pieces = [text[:n], text[n : n + 1], text[n + 1 : n + 4], [text[-1]]]
    rows = []
    for number, piece in enumerate(pieces):
        if number == 3:
            row.length -= 2
        logits = model.forward([row], [piece], with_logits=True)
        assert logits is not None
        rows.append(logits[-1].float())
    found = torch.stack(rows)
    if model.draft_ids is None:
        assert found.shape[1] == vocab_size
        return found
    columns = torch.full((4, vocab_size), -torch.inf, device=found.device)
    return columns.index_copy_(1, model.draft_ids, found)


@torch.inference_mode()
def by_modules(drafter: Any, text: list[int]) -> Tensor:  # [4, V]
    n = len(text) - 5
    texts = [text[:n], text[: n + 1], text[: n + 4], [*text[: n + 2], text[-1]]]
    rows = [drafter.trainable(torch.tensor([t], device=DEVICE))[0, -1] for t in texts]
    return drafter.widen(torch.stack(rows))


def agrees(drafter: Any, text: list[int]) -> None:
    found = read(model_of(drafter), drafter.vocab_size, text)
    wanted = by_modules(drafter, text)
    known = wanted.isfinite()
    assert torch.equal(found.isfinite(), known)
    assert relative(found[known], wanted[known]) < TOLERANCE
    gaps = wanted[:, known[0]].diff(dim=0).abs().amax(-1)
    assert gaps.min() > 100 * TOLERANCE * wanted[known].abs().max()  # a law for every piece


@pytest.mark.parametrize(("name", "head"), CASES)
def test_a_cut_has_the_law_of_its_modules(name: str, head: str) -> None:
    drafter = cut(family(name), head)
    model = model_of(drafter)
    assert (model.draft_ids is None) == (head == "whole")
    assert model.max_context == 700
    agrees(drafter, ids(13))


@pytest.mark.parametrize("sizes", [(53, 47), (60, 60), (60, 50), (50, 50), (50, 41)])
def test_a_whole_model_beside_a_target_of_other_columns(sizes: tuple[int, int]) -> None:
    """Its 53 columns against V of the target, of which some are padding."""
    drafter = whole(build("Qwen2", **ONE_LAYER), *sizes)
    agrees(drafter, ids(9))
    weights = model_of(drafter).forward.weights
    assert weights.head.weight.data_ptr() == drafter.trainable.full_head.weight.data_ptr()


def test_any_network_that_is_a_model_of_the_family() -> None:
    drafter = cut(family("qwen3"))
    drafter.trainable = WholeNetwork(build("Llama", **ONE_LAYER).to(DEVICE))
    agrees(drafter, ids(9))


def test_it_drafts_what_the_host_drafts() -> None:
    """Greedy tokens, one after the other, as a session of the drafter writes them."""
    drafter, text = cut(build("Mistral", **ONE_LAYER, sliding_window=5)), ids(7)
    drafted = drafter.open().propose(text, 3, sampler(Sampling())).token_ids
    model, found, pending = model_of(drafter), [], text
    row = model.forward.open()
    assert model.draft_ids is not None
    for _ in range(3):
        with torch.inference_mode():
            logits = model.forward([row], [pending], with_logits=True)
        assert logits is not None
        pending = [int(model.draft_ids[logits[-1].argmax()])]
        found += pending
    assert found == drafted


def change_weights(drafter: LmDrafter) -> None:
    with torch.no_grad():
        drafter.trainable.trunk.layers[0].mlp.up_proj.weight.mul_(-1.0)


def change_draft_ids(drafter: LmDrafter) -> None:
    drafter.set_draft_vocab((DRAFT_IDS + 1).to(DEVICE))


@pytest.mark.parametrize("change", [change_weights, change_draft_ids])
def test_the_same_parts_until_weights_change(change: Any) -> None:
    drafter = cut(build("Llama", **ONE_LAYER))
    parts = drafter.on_device()
    assert drafter.on_device() is parts
    change(drafter)
    assert drafter.on_device() is not parts
    agrees(drafter, ids(9))


@pytest.mark.parametrize("head", HEADS)
def test_what_is_shared_is_not_copied_and_modules_stay_as_they_were(head: str) -> None:
    model = family(UNTIED).to(DEVICE)
    target = NativeTarget(model, tiny_tokenizer(), exactness="law", kernels=True)
    held = target.weight_bytes
    drafter = cut(model, head, target_parts(target))
    before = {name: tensor.data_ptr() for name, tensor in drafter.trainable.named_parameters()}
    weights = model_of(drafter).forward.weights
    layer = drafter.trainable.trunk.layers[0]
    assert weights.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert weights.head.weight.data_ptr() == drafter.trainable.head_weight().data_ptr()
    if head == "whole":
        assert weights.head.weight.data_ptr() == target.head.weight.data_ptr()
    assert weights.layers[0].down.weight.data_ptr() == layer.mlp.down_proj.weight.data_ptr()
    assert target.weight_bytes == held
    assert before == {n: t.data_ptr() for n, t in drafter.trainable.named_parameters()}
    attention, mlp = layer.self_attn, layer.mlp
    copied = sum(m.weight.nbytes for m in (attention.q_proj, attention.k_proj, attention.v_proj))
    copied += sum(
        m.bias.nbytes for part in (attention, mlp) for m in part.modules() if hasattr(m, "bias")
    )
    assert drafter.device_copied_bytes == 2 * copied


def with_adapters(base: LmDrafter) -> Any:
    config = LoraConfig(
        base="base",
        rank=2,
        alpha=4.0,
        target_modules=["down_proj"],
        train_head=True,
        merged=True,
        init_seed=0,
    )
    drafter: Any = config.build(BuildContext(base.parts, parts={"base": base}))
    with torch.no_grad():
        for tensor in drafter.adapted.own_tensors().values():
            tensor.add_(0.3)
    return drafter


def test_merged_adapters_draft_there_and_share_the_copies_of_their_base(
    caplog: pytest.LogCaptureFixture,
) -> None:
    base = cut(build("Llama", **ONE_LAYER))
    drafter = with_adapters(base)
    with caplog.at_level(logging.INFO):
        assert drafter.on_device() is None
        assert drafter.on_device() is None
    assert caplog.text.count("once they are merged") == 1
    drafter.merge()
    agrees(drafter, ids(9))
    ours, theirs = (model_of(d).forward.weights.layers[0] for d in (drafter, base))
    assert ours.qkv is theirs.qkv
    assert ours.down.weight.data_ptr() != theirs.down.weight.data_ptr()


def test_lookups_hand_over_their_numbers() -> None:
    drafter = NgramDrafter(NgramConfig(min_ngram=2, max_ngram=5, max_offer=7))
    assert drafter.on_device() == drafter.on_device()
    assert drafter.on_device() is drafter.on_device()
    assert drafter.on_device().lookup == DeviceLookup(2, 5, 7, 2)
    assert drafter.on_device().model is None
    assert isinstance(drafter, DeviceDrafter)


def composite(lookup: NgramDrafter, model: Any, min_match: int) -> CompositeDrafter:
    config = CompositeConfig(lookup="ngram", model="cut", min_match=min_match)
    return CompositeDrafter(config, lookup, model)


@pytest.mark.parametrize("min_match", [0, 1, 3])
def test_a_composite_drafts_with_its_members(min_match: int) -> None:
    lookup, model = (
        NgramDrafter(NgramConfig(min_ngram=2, max_ngram=3, max_offer=4)),
        cut(family("llama")),
    )
    drafter = composite(lookup, model, min_match)
    parts = drafter.on_device()
    assert parts is not None
    assert parts.lookup == DeviceLookup(2, 3, 4, max(2, min_match))
    assert parts.model is model_of(model)
    assert drafter.on_device() is parts
    change_weights(model)
    after = drafter.on_device()
    assert isinstance(after, DeviceParts)
    assert after is not parts
    assert after.model is model_of(model)


def test_what_it_does_not_know_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    lookup = NgramDrafter(NgramConfig(min_ngram=1, max_ngram=3, max_offer=4))
    gelu = cut(build("Llama", hidden_act="gelu"))
    mixed = cut(family("llama"), "whole")
    mixed.trainable = copy.deepcopy(mixed.trainable).double()
    both = composite(lookup, gelu, 1)
    two_lookups = composite(lookup, lookup, 1)
    with caplog.at_level(logging.INFO):
        for drafter in (gelu, mixed, both, two_lookups) * 2:
            assert drafter.on_device() is None
    assert caplog.text.count("hidden_act=gelu") == 1
    assert caplog.text.count("of several types") == 1
    assert caplog.text.count("a composite of") == 2
    plain = cut(family("llama"))
    plain.backend = "transformers"
    assert plain.on_device() is None
    plain.backend = "auto"
    assert plain.on_device() is not None
