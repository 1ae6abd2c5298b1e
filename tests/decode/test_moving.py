"""Bugs these tests would catch: a model that moves as many tensors, each with a hole behind it; one
that comes out with other bits, another shape, untied, or without a parameter; matrices that lie
side by side and are copied all the same; others that do not and are read as if they did; a moved
model that cannot be trained, copied or saved.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import FAMILIES, build, family, ids, logits
from torch import nn

from decode.native.target import NativeTarget
from decode.targets.loading import load_causal_lm
from decode.targets.moving import ALIGNED, gather, moved, side_by_side

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def storages(model: Any) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_becomes_one_allocation_bit_for_bit(name: str) -> None:
    model = family(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    same = dict(model.named_parameters())
    gather(model, CPU)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(torch.equal(after[n], before[n]) for n in before)
    assert all(after[n] is same[n] for n in before)  # so that who is tied stays tied
    assert len(storages(model)) == 1
    held = next(model.parameters()).untyped_storage().nbytes()
    assert held <= sum(p.nbytes for p in before.values()) + ALIGNED * len(before)
    for layer in model.model.layers:
        attention = layer.self_attn
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        whole = side_by_side([part.weight for part in parts])
        assert whole is not None
        assert torch.equal(whole, torch.cat([part.weight for part in parts]))


def test_side_by_side_is_taken_as_it_is_and_held_once() -> None:
    wanted = logits(NativeTarget(family("qwen2"), None, exactness="law"), ids(20), 3)
    model = family("qwen2")
    gather(model, CPU)
    target = NativeTarget(model, None, exactness="law")
    assert len(storages(target.model)) == 1
    assert target.weight_bytes == next(model.parameters()).untyped_storage().nbytes()
    assert torch.equal(logits(target, ids(20), 3), wanted)


def test_what_only_seems_to_lie_side_by_side() -> None:
    rows = torch.arange(60.0).view(10, 6)
    assert side_by_side([rows[:2], rows[3:5]]) is None
    assert side_by_side([rows[2:4], rows[:2]]) is None
    assert side_by_side([rows[:2], rows[2:4].clone()]) is None
    assert side_by_side([rows[:, :3], rows[:, 3:]]) is None
    assert side_by_side([rows.view(-1)[:12].view(2, 6), rows.view(-1)[12:21].view(3, 3)]) is None
    found = side_by_side([rows[1:3], rows[3:4]])
    assert found is not None
    assert torch.equal(found, rows[1:4])
    assert found.data_ptr() == rows[1:].data_ptr()


def test_a_moved_model_is_copied_saved_and_trained(tmp_path: Path) -> None:
    model = family("qwen2")
    gather(model, CPU)
    again = copy.deepcopy(model.model.layers[0])
    assert not storages(again) & storages(model)
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(str(tmp_path), torch.float32)
    for (name, one), (_, other) in zip(
        model.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    loss = model(torch.tensor([ids(9)])).logits.square().mean()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_only_a_move_to_a_gpu_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", num_hidden_layers=1)
    before = storages(model)
    assert moved(model, "cpu") is model
    assert storages(model) == before
    gathered: list[torch.device] = []
    monkeypatch.setattr("decode.targets.moving.gather", lambda _, device: gathered.append(device))
    monkeypatch.setattr(nn.Module, "to", lambda self, *_: self)
    assert moved(model, "cuda") is model
    assert [device.type for device in gathered] == ["cuda"]
    model.model.norm.bfloat16()
    moved(model, "cuda")
    assert len(gathered) == 1  # several types have no tensor in common


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_holds_little_more_than_the_weights() -> None:
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "head_dim": 128, "vocab_size": 4096}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "num_hidden_layers": 8}
    model = build("Qwen2", dtype=torch.bfloat16, **sizes, **heads)
    num_bytes = sum(p.nbytes for p in model.parameters())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    target = NativeTarget(moved(model, "cuda"), None, exactness="law", kernels=False)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - before
    assert target.weight_bytes < num_bytes + (1 << 20)
    assert held < num_bytes + (8 << 20)  # each tensor by itself would take some 90 MB more
