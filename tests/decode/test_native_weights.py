"""Bugs these tests would catch: a shard of the weights left out; a model that is held twice; one
that was given and is not whole any more, or no longer shares its matrices; weights that come back
with other bits; a drafter trained on an emptied model; a model of another kind computed as if it
were a Llama; a fallback that is silent, or said twice; a choice that is ignored.
"""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import FAMILIES, VOCAB_SIZE, build, family, ids, logits, relative
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import PreTrainedTokenizerFast

from decode import SpeculativeDecoder
from decode.costs import costs_key
from decode.native import target as native_target
from decode.native.architecture import UnsupportedModelError
from decode.native.products import blocked_is_possible
from decode.native.target import NativeTarget
from decode.resolve import resolve_target
from decode.targets.backends import make_target
from decode.targets.choices import check_choice, fast_dtype, native_obstacle
from decode.targets.loading import load_causal_lm
from decode.targets.transformers import TransformersTarget

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 1e-4
UNTIED = "llama, biases, untied, no groups"
needs_blocked = pytest.mark.skipif(
    not blocked_is_possible(torch.device("cpu"), torch.float32), reason="PyTorch without oneDNN"
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w52")


def native(model: Any, **settings: Any) -> NativeTarget:
    return NativeTarget(model, None, **{"exactness": "law", **settings})


@pytest.mark.parametrize("name", ["qwen2", UNTIED])
def test_sharded_safetensors_are_read_whole(name: str, tmp_path: Path) -> None:
    model = family(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = native(load_causal_lm(str(tmp_path), torch.float32), take=True)
    wanted = logits(TransformersTarget(model, None), ids(40), 4)
    assert relative(logits(ours, ids(40), 4), wanted) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", UNTIED, "qwen3"])
def test_a_given_model_stays_whole_and_nothing_is_held_twice(name: str) -> None:
    model = family(name)
    before = copy.deepcopy(model)
    num_bytes = sum(p.nbytes for p in model.parameters())
    ours = native(model)
    assert ours.model is model
    assert ours.weight_bytes == num_bytes
    for key, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    text = torch.tensor([ids(30)])
    assert torch.equal(model(text).logits, before(text).logits)
    # Changing a parameter changes our logits: they share their storage.
    found = logits(ours, ids(30), 2)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(-1.0)
        model.model.layers[2].mlp.up_proj.weight.mul_(0.5)
    changed = logits(ours, ids(30), 2)
    assert relative(changed, found) > 100 * TOLERANCE
    wanted = logits(TransformersTarget(model, None), ids(30), 2)
    assert relative(changed, wanted) < TOLERANCE


@needs_blocked
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", UNTIED, "qwen3"])
def test_taken_weights_are_held_once_and_come_back_bit_for_bit(
    name: str, dtype: torch.dtype
) -> None:
    model = family(name, dtype)
    before = copy.deepcopy(model)
    num_bytes = sum(p.nbytes for p in model.parameters())
    head = model.lm_head.weight.nbytes if model.config.tie_word_embeddings else 0
    ours = native(model, take=True)
    assert ours.layout == "blocked"
    assert ours.weight_bytes == num_bytes + head  # a tied head lies there in both layouts
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta
    found = logits(ours, ids(30), 3)
    with torch.inference_mode():
        whole = ours.model
    assert not any(p.is_inference() or not p.requires_grad for p in whole.parameters())
    for key, tensor in before.state_dict().items():
        assert torch.equal(whole.state_dict()[key], tensor), key
    assert ours.model is whole
    assert torch.equal(logits(ours, ids(30), 3), found)
    if head:
        assert whole.lm_head.weight is whole.model.embed_tokens.weight


@needs_blocked
def test_what_costs_hold_for_is_asked_without_a_second_copy() -> None:
    ours = native(family("llama"), take=True)
    law, bitwise = costs_key(ours), costs_key(native(family("llama"), exactness="bitwise"))
    theirs = costs_key(TransformersTarget(family("llama"), None))
    assert ours._model.model.layers[0].mlp.up_proj.weight.is_meta
    assert len({law, bitwise, theirs}) == 3
    assert law.replace("native law", "transformers") == theirs


OTHER_ROPE = {"rope_theta": 1e4, "rope_type": "longrope", "factor": 2.0}
REFUSED = {
    "another class": ("GPTNeoX", {"num_attention_heads": 6}, "GPTNeoXForCausalLM is none of"),
    "another activation": ("Llama", {"hidden_act": "gelu"}, "hidden_act=gelu is not silu"),
    "angles that follow from the length": (
        "Llama",
        {
            "rope_parameters": {
                **OTHER_ROPE,
                "long_factor": [1.0] * 5,
                "short_factor": [2.0] * 5,
                "original_max_position_embeddings": 64,
            }
        },
        "rope_type=longrope is none of",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused_untouched_and_goes_through_transformers(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind, changes, reason = REFUSED[case]
    model = build(kind, **changes)
    name = type(model).__name__
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedModelError, match=reason):
        native(model, take=True)
    with caplog.at_level(logging.WARNING):
        made = make_target(model, None, backend="native", exactness="auto", take=True)
    assert isinstance(made, TransformersTarget)
    assert len(caplog.messages) == 1
    assert "goes through the transformers backend" in caplog.messages[0]
    assert reason in caplog.messages[0]
    assert reason in (native_obstacle(model.config.to_dict() | {"architectures": [name]}) or "")
    with pytest.raises(ValueError, match="exactness=bitwise is not to be had"):
        make_target(model, None, backend="native", exactness="bitwise", take=True)
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())


def test_kernels_share_what_the_module_holds() -> None:
    """As on CUDA, where a drafter or a peer asks for the module of a target that was taken."""
    model = family(UNTIED)
    num_bytes = sum(p.nbytes for p in model.parameters())
    ours = native(model, take=True, kernels=True)
    assert ours.layout == "stacked"
    assert ours.weight_bytes == num_bytes
    assert ours.model is model
    assert ours.weight_bytes == num_bytes
    assert all(not parameter.is_meta for parameter in model.parameters())


def test_where_bitwise_must_hold_a_target_that_rounds_by_width_is_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_target, "width_dependence", lambda target: "they differ")
    with pytest.raises(UnsupportedModelError, match="does not hold there"):
        native(build("Llama"), must_hold=True, exactness="bitwise")
    assert not caplog.messages
    assert native(build("Llama"), must_hold=True, exactness="law").width_dependence is None
    assert native(build("Llama"), exactness="bitwise").width_dependence == "they differ"
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_the_family_is_known_by_its_saved_config(name: str, tmp_path: Path) -> None:
    family(name).config.save_pretrained(tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_text())}
    config["architectures"] = [f"{FAMILIES[name][0]}ForCausalLM"]  # a model's own saving adds it
    assert native_obstacle(config) is None


def test_wrapped_matrices_and_part_of_a_head_turned_are_refused() -> None:
    class Adapted(nn.Linear):
        pass

    model = family("llama")
    model.model.layers[1].mlp.down_proj = Adapted(44, 36)
    with pytest.raises(UnsupportedModelError, match="modules of class Adapted"):
        native(model)
    model = family("llama")
    model.model.layers[0].mlp.to(torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="several devices or dtypes"):
        native(model)
    model = family("llama")
    rotary = model.model.rotary_emb
    rotary.inv_freq, rotary.original_inv_freq = rotary.inv_freq[:3], rotary.inv_freq[:3]
    with pytest.raises(UnsupportedModelError, match="turns 6 of 10 values"):
        native(model)


def test_choices_are_one_sentence() -> None:
    for backend, exactness, told in (
        ("fast", "law", "backend=fast is not known; use auto, native, transformers"),
        ("native", "nearly", "exactness=nearly is not known; use auto, bitwise or law"),
        ("transformers", "bitwise", "use backend=native"),
    ):
        with pytest.raises(ValueError, match=told):
            check_choice(backend, exactness)
    with pytest.raises(ValueError, match="exactness=nearly"):
        native(family("llama"), exactness="nearly")


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("auto", NativeTarget), ("native", NativeTarget), ("transformers", TransformersTarget)],
)
def test_a_name_and_a_model_go_through_the_backend_asked_for(
    backend: str, kind: type, tmp_path: Path
) -> None:
    tokenizer = word_tokenizer()
    family("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    decoder = SpeculativeDecoder(tmp_path, backend=backend, device="cpu")
    assert type(decoder.target) is kind
    assert decoder.target.tokenizer is not None  # type: ignore[attr-defined]
    assert getattr(decoder.target, "exactness", "law") == (
        "bitwise" if kind is NativeTarget else "law"
    )
    given = resolve_target(
        family("llama"), tokenizer=tokenizer, device=None, dtype="bfloat16", backend=backend
    )
    assert type(given) is kind
    assert given.tokenizer is tokenizer  # type: ignore[attr-defined]
    assert decoder.generate([[1, 2, 3]], 4).metrics[0].backend == decoder.target.backend


def test_without_a_choice_a_name_is_fast_and_a_given_model_left_alone(tmp_path: Path) -> None:
    model = family("llama")
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    named: Any = SpeculativeDecoder(tmp_path, device="cpu").target
    assert (named.backend, named.exactness, named.dtype) == ("native", "bitwise", torch.float32)
    before = [p.data_ptr() for p in model.parameters()]
    given: Any = SpeculativeDecoder(model, tokenizer=word_tokenizer()).target
    assert isinstance(given, TransformersTarget)
    assert [p.data_ptr() for p in model.parameters()] == before
    fast: Any = SpeculativeDecoder(tmp_path, device="cpu", dtype="auto").target
    assert fast.dtype == getattr(torch, fast_dtype("cpu"))
    with pytest.raises(ValueError, match="dtype=float3 is not known; use auto, float32"):
        SpeculativeDecoder(tmp_path, dtype="float3")
