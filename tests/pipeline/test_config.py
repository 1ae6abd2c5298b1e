"""A composed tree becomes typed values, or one sentence.

Would catch: a wrong type that is converted or let through, in a nested mapping too; an unknown or
a missing key; null where a value belongs; an unset mandatory value; an interpolation that leads
nowhere; a pool whose entries name each other wrongly; a message without the key or the value.
"""

from dataclasses import dataclass

import pytest
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from pipeline.config import ConfigError, suggestion, typed, typed_pool, typed_settings


@dataclass(frozen=True, kw_only=True)
class Inner:
    width: int


@dataclass(frozen=True, kw_only=True)
class Toy:
    count: int
    rate: float
    on: bool
    names: list[str]
    limits: dict[str, int]
    note: str | None
    inner: Inner


VALUES = {
    "_target_": "test_config.Toy",
    "count": 3,
    "rate": 1,
    "on": True,
    "names": ["a"],
    "limits": {"test": 4},
    "note": None,
    "inner": {"_target_": "test_config.Inner", "width": 5},
}


def toy(**changes: object) -> Toy:
    return typed(OmegaConf.create({**VALUES, **changes}), "stages.toy")


def test_values_arrive_with_their_types():
    assert toy() == Toy(
        count=3,
        rate=1.0,
        on=True,
        names=["a"],
        limits={"test": 4},
        note=None,
        inner=Inner(width=5),
    )
    assert isinstance(toy().rate, float)
    assert isinstance(toy().names, list)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "abc"}, "stages.toy.count=abc is not an integer; give one, as in stages.toy.c"),
        ({"count": 1.5}, "stages.toy.count=1.5 is not an integer"),
        ({"count": None}, "stages.toy.count=null is not allowed"),
        ({"count": "???"}, "stages.toy.count has no value yet; add stages.toy.count=VALUE"),
        ({"count": "${nowhere}"}, "stages.toy.count cannot be read (Interpolation key 'nowhere'"),
        ({"rate": "fast"}, "stages.toy.rate=fast is not a number"),
        ({"on": "perhaps"}, "stages.toy.on=perhaps is not true or false"),
        ({"names": "a"}, "stages.toy.names=a is not a list"),
        ({"names": [["a"]]}, "stages.toy.names holds ['a'] where one plain value belongs"),
        ({"limits": 3}, "stages.toy.limits=3 is not a mapping"),
        ({"limits": {"test": "x"}}, "stages.toy.limits.test=x is not an integer"),
        ({"cuont": 3}, "stages.toy.cuont is not a key of stages.toy; did you mean count?"),
        ({"inner": {"_target_": "test_config.Inner"}}, "stages.toy.inner.width is missing"),
        (
            {"inner": {"_target_": "test_config.Inner", "width": "w"}},
            "stages.toy.inner.width=w is not an integer",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence_with_key_and_value(change, message):
    with pytest.raises(ConfigError) as caught:
        toy(**change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_is_missing_is_named():
    node = OmegaConf.create({key: value for key, value in VALUES.items() if key != "rate"})
    with pytest.raises(ConfigError, match=r"stages\.toy\.rate is missing"):
        typed(node, "stages.toy")


def test_a_node_without_a_class_is_refused():
    with pytest.raises(ConfigError, match="target names no class; choose a file of conf/target"):
        typed(OmegaConf.create({"a": 1}), "target")


def test_a_class_that_is_gone_is_our_own_mistake():
    with pytest.raises((InstantiationException, ImportError)):
        typed(OmegaConf.create({"_target_": "test_config.Gone"}), "target")


NGRAM = {"_target_": "drafters.ngram.NgramConfig", "min_ngram": 1, "max_ngram": 3, "max_offer": 4}
BOTH = {"_target_": "drafters.composite.CompositeConfig", "min_match": 1}


def pool(**entries: dict) -> object:
    plain = {"trained_by": None, "domains": [], "init_from": None}
    return typed_pool(
        OmegaConf.create({"entries": {name: {**plain, **entry} for name, entry in entries.items()}})
    )


def test_a_pool_keeps_its_entries_in_order():
    found = pool(b={"drafter": NGRAM}, a={"drafter": {**BOTH, "lookup": "b", "model": "b"}})
    assert list(found.entries) == ["b", "a"]
    assert found.entries["a"].drafter.part_names == ("b", "b")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "the pool is empty"),
        ({"a": {}}, "pool.entries.a.drafter is missing"),
        (
            {"a": {"drafter": NGRAM, "trained_by": "destill"}},
            "did you mean pool.entries.a.trained_by=distill?",
        ),
        ({"a": {"drafter": NGRAM, "domains": "code"}}, "pool.entries.a.domains=code is not a list"),
        ({"a": {"drafter": NGRAM, "init_from": "b"}}, "pool.entries.a.init_from=b is not known"),
        (
            {
                "one": {"drafter": NGRAM},
                "a": {"drafter": {**BOTH, "lookup": "one", "model": "onee"}},
            },
            "did you mean pool.entries.a.drafter=one?",
        ),
        ({"a": {"drafter": {**NGRAM, "max_ngram": "x"}}}, "pool.entries.a.drafter.max_ngram=x"),
        ({"a": {"drafter": NGRAM, "weight": 1}}, "pool.entries.a.weight is not a key"),
    ],
)
def test_a_wrong_pool_is_one_sentence(entries, message):
    with pytest.raises(ConfigError) as caught:
        pool(**entries)
    assert message in str(caught.value)


def test_settings_are_typed_too():
    values = {"stage": None, "entry": None, "build_missing": False, "force": False}
    values |= {"root": "outputs", "seed": 0, "debug": False}
    assert typed_settings(OmegaConf.create(values)).seed == 0
    for wrong, message in [({"seed": "x"}, "seed=x is not an integer"), ({"seed": -1}, "seed=-1")]:
        with pytest.raises(ConfigError, match=message):
            typed_settings(OmegaConf.create({**values, **wrong}))


def test_a_suggestion_names_what_is_close_and_else_everything():
    assert (
        suggestion("prepar", ["prepare", "all"]) == "did you mean prepare? (one of: all, prepare)"
    )
    assert suggestion("zzz", ["prepare", "all"]) == "use one of: all, prepare"
    assert suggestion("zzz", [f"k{n:02}" for n in range(30)]).endswith(", ...")
