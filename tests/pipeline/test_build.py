"""Would catch: a part built after the composite that needs it, a specialist trained before its
parent is there, a training stage that picks the wrong entry, a trained drafter built without its
weights, a loop of parts.

Tolerances: none.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target_folder
from workspace import RUNTIME, tiny_config

from decode.targets.choices import fast_dtype
from decode.types import Drafter
from drafters.base import BuildContext, target_parts
from drafters.composite import CompositeConfig
from drafters.lm import LmConfig
from drafters.lora import LoraConfig
from drafters.ngram import NgramConfig
from pipeline.build import (
    NamedEntry,
    build_drafters,
    build_order,
    drafter_needs,
    load_target,
    parent_need,
    select_entry,
)
from pipeline.compose import compose_config
from pipeline.config import Pool, PoolEntry, typed
from pipeline.distill import Distill
from pipeline.stage import describe

CUT = LmConfig(source=None, layers=[0, -1], num_draft_vocab=0, train_head=False, dtype="float32")


def entry(drafter: Any, trained_by: str | None = None, init_from: str | None = None) -> PoolEntry:
    return PoolEntry(drafter=drafter, trained_by=trained_by, domains=[], init_from=init_from)


def pool(**more: PoolEntry) -> Pool:
    """The composite stands first, before its parts."""
    entries = {
        "both": entry(CompositeConfig(lookup="ngram", model="generic", min_match=2)),
        "code": entry(CUT, "finetune", init_from="generic"),
        "ngram": entry(NgramConfig(min_ngram=1, max_ngram=3, max_offer=5)),
        "generic": entry(CUT, "distill"),
    }
    return Pool(entries={**entries, **more})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_target_folder(tmp_path_factory.mktemp("target"))
    return load_target(tiny_config(folder), RUNTIME)


def trained(target: Any, folder: Path, fill: float) -> Path:
    """A drafter's artifact whose norm weights are all `fill`."""
    drafter: Any = CUT.build(BuildContext(target_parts(target)))
    with torch.no_grad():
        drafter.trainable.trunk.norm.weight.fill_(fill)
    drafter.save(folder)
    return folder


def test_parts_come_first_and_once() -> None:
    assert build_order(pool()) == ["ngram", "generic", "both", "code"]
    assert build_order(pool(), ["both"]) == ["ngram", "generic", "both"]
    assert build_order(pool(), ["code"]) == ["code"]


def test_needs_name_the_stage_and_the_entry() -> None:
    needs = drafter_needs(pool())
    assert {name: need.stage for name, need in needs.items()} == {
        "drafter:generic": "distill",
        "drafter:code": "finetune",
    }
    assert needs["drafter:code"].groups["entry"].name == "code"
    assert list(drafter_needs(pool(), ["both"])) == ["drafter:generic"]
    assert drafter_needs(pool(), ["ngram"]) == {}


def test_a_specialist_needs_its_parent() -> None:
    entries = pool().entries
    parent = parent_need(pool(), entries["code"])["parent"]
    assert (parent.stage, parent.groups["entry"].name) == ("distill", "generic")
    assert parent_need(pool(), entries["generic"]) == {}
    for name in ("ngram", "nobody"):
        orphan = entry(CUT, "finetune", init_from=name)
        with pytest.raises(ValueError, match=f"init_from={name} must name a trained entry"):
            parent_need(pool(), orphan)


def test_a_stage_asks_for_answers_and_parent() -> None:
    settings: dict[str, Any] = dict.fromkeys(
        ("num_steps", "batch_size", "accumulate", "max_tokens", "checkpoint_every"), 4
    )
    settings |= dict.fromkeys(("validate_every", "validation_prompts", "num_draft_tokens"), 4)
    settings |= dict.fromkeys(
        ("learning_rate", "warmup_share", "weight_decay", "max_grad_norm"), 0.1
    )
    settings |= {"num_tokens": 0, "row_tokens": 0, "chunk_tokens": 4, "precision": "float32"}
    settings |= {
        "gradient_checkpointing": False,
        "compile_layers": False,
        "mix": {"tv": 1.0},
        "teacher": "recorded",
    }
    settings |= {"position_weights": "uniform", "half_life": 1.0, "lk_eta": 1.0}
    settings |= dict.fromkeys(("onpolicy_from", "onpolicy_share", "onpolicy_temperature"), 0.0)
    stage = Distill(**settings, onpolicy_tokens=1, drop_loops=False, rehearsal_share=0.0)
    groups = {"pool": pool(), "entry": select_entry(pool(), "code", "finetune")}
    assert {k: n.stage for k, n in stage.needs(groups).items()} == {
        "answers": "regenerate",
        "parent": "distill",
    }


LORA = LoraConfig(
    base="generic",
    rank=2,
    alpha=4.0,
    target_modules=["q_proj"],
    train_head=False,
    merged=False,
    init_seed=0,
)


def test_training_is_given_the_parts_and_named_after_them() -> None:
    """Trained or not: a base that is only a name in the pool changes the identity too."""
    parts = pool(special=entry(LORA, "distill"))
    needs = parent_need(parts, parts.entries["special"])
    assert {key: need.groups["entry"].name for key, need in needs.items()} == {
        "drafter:generic": "generic"
    }
    named = select_entry(parts, "special", "distill")
    assert named == drafter_needs(parts)["drafter:special"].groups["entry"]
    assert list(named.parts) == ["generic"]
    again = pool(special=entry(LORA, "distill", init_from="other"), other=entry(LORA, "distill"))
    assert set(parent_need(again, again.entries["special"])) == {"parent", "drafter:generic"}
    bare = pool(special=entry(LORA, "distill"), generic=entry(CUT))
    assert parent_need(bare, bare.entries["special"]) == {}
    deeper = entry(dataclasses.replace(CUT, layers=[0, 1]))
    other = pool(special=entry(LORA, "distill"), generic=deeper)
    described = [describe(select_entry(p, "special", "distill")) for p in (bare, other)]
    assert described[0] != described[1]


def test_the_entry_to_train() -> None:
    assert select_entry(pool(), None, "distill").name == "generic"
    assert select_entry(pool(), "code", "finetune").entry is not None
    with pytest.raises(ValueError, match=r"entry=code is not trained by stage=distill.*: generic"):
        select_entry(pool(), "code", "distill")
    with pytest.raises(ValueError, match=r"entry=cod is not trained.*: code"):
        select_entry(pool(), "cod", "finetune")
    two = pool(chat=entry(CUT, "finetune"))
    with pytest.raises(ValueError, match=r"add entry=<name>.*: code, chat"):
        select_entry(two, None, "finetune")
    bare = Pool(entries={"ngram": pool().entries["ngram"]})
    with pytest.raises(ValueError, match="trained_by=distill: none"):
        select_entry(bare, None, "distill")


def test_drafters_have_their_own_weights_and_share_parts(target: Any, tmp_path: Path) -> None:
    inputs = {
        "drafter:generic": trained(target, tmp_path / "generic", 0.25),
        "drafter:code": trained(target, tmp_path / "code", 0.75),
    }
    built: dict[str, Any] = build_drafters(pool(), target, inputs)
    assert list(built) == ["both", "code", "ngram", "generic"]  # as the pool lists them
    norms = {name: built[name].trainable.trunk.norm.weight for name in ("generic", "code")}
    assert float(norms["generic"].detach().mean()) == 0.25
    assert float(norms["code"].detach().mean()) == 0.75
    assert built["both"].model is built["generic"]
    assert all(isinstance(drafter, Drafter) for drafter in built.values())
    assert list(build_drafters(pool(), target, inputs, ["both"])) == ["both"]


def test_pools_that_do_not_fit_together() -> None:
    looped = pool(
        a=entry(CompositeConfig(lookup="ngram", model="b", min_match=2)),
        b=entry(CompositeConfig(lookup="ngram", model="a", min_match=2)),
    )
    with pytest.raises(ValueError, match=r"a is part of itself .*a -> b -> a"):
        build_order(looped)
    with pytest.raises(ValueError, match="part medusa of pool entry c is not in the pool"):
        build_order(pool(c=entry(CompositeConfig(lookup="ngram", model="medusa", min_match=2))))
    with pytest.raises(ValueError, match="drafter typo is not in the pool"):
        build_order(pool(), ["typo"])
    with pytest.raises(
        ValueError, match="trained_by=magic; choose null or one of finetune, distill"
    ):
        drafter_needs(pool(m=entry(CUT, "magic")))


def test_the_dtype_of_a_target(tmp_path: Path) -> None:
    config = tiny_config(tiny_target_folder(tmp_path))
    for asked, found in ((None, "float32"), ("bfloat16", "bfloat16"), ("auto", fast_dtype("cpu"))):
        model = load_target(config, RUNTIME, dtype=asked).model
        assert str(next(model.parameters()).dtype) == f"torch.{found}"
    with pytest.raises(ValueError, match="dtype=int4 is not known"):
        load_target(config, RUNTIME, dtype="int4")


def distill_of(**overrides: Any) -> Distill:
    """The composed stage as an entry with these overrides trains by it."""
    stage = typed(compose_config([]).stages.distill, "stages.distill")
    changed = PoolEntry(
        drafter=CUT, trained_by="distill", domains=[], init_from=None, overrides=overrides
    )
    return stage.for_groups({"entry": NamedEntry("generic", changed)})


def test_an_entry_may_train_otherwise_than_the_others() -> None:
    plain, longer = distill_of(), distill_of(num_steps=0, num_tokens=5000, mix={"tv": 0.5})
    assert (longer.num_steps, longer.num_tokens, longer.batch_size) == (0, 5000, plain.batch_size)
    assert longer.mix == {**plain.mix, "tv": 0.5}
    assert describe(longer) != describe(plain)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"num_step": 5}, r"overrides\.num_step is not a key.*did you mean num_steps"),
        ({"num_steps": "many"}, r"overrides\.num_steps=many is not an integer"),
        ({"num_steps": 0}, "must be one positive number and a 0"),
    ],
)
def test_overrides_that_do_not_fit_are_named(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        distill_of(**overrides)


@pytest.mark.parametrize("backend", ["native", "auto"])
def test_a_native_target_is_built_and_shares_its_parts(tmp_path: Path, backend: str) -> None:
    plain = tiny_config(tiny_target_folder(tmp_path))
    config = dataclasses.replace(plain, backend=backend)
    ours, theirs = load_target(config, RUNTIME), load_target(plain, RUNTIME)
    assert (ours.backend, theirs.backend) == ("native", "transformers")
    cut = LmConfig(source=None, layers=[0, -1], num_draft_vocab=0, train_head=False, dtype="auto")
    one, other = (cut.build(BuildContext(target_parts(target))) for target in (ours, theirs))
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(one.trainable(ids), other.trainable(ids))
    assert one.num_parameters == other.num_parameters  # the embedding is the target's
    assert torch.equal(ours.model(ids).logits, theirs.model(ids).logits)
