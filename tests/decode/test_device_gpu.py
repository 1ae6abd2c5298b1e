"""Bugs these tests would catch on a GPU: a step that waits for the device, copies more than once or
falls back to the reference; a captured step that reads an old number or address; noise that is used
twice, or a draft whose law is not the one that was reported, which bend the output's law; a row
that goes wrong, or a slot that is lost, once in a thousand generations.

The law's test: a target whose logits follow from the last token alone (attention adds nothing), so
that every transition of a long text is a draw from a known law. 200,000 draws, chi-square at 1e-5.
"""

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from device_drafters import LookupDrafter, ModelDrafter
from native_models import build, ids
from test_device_engine import Arms, Tokens, generate, pool

import kernels.coupled_reference
import kernels.laws
import kernels.reference
from decode import Sampling, SpeculativeDecoder
from decode.clock import SystemClock
from decode.cost_measurement import quick_costs
from decode.device.engine import DeviceEngine
from decode.native.target import NativeTarget
from decode.types import OFF
from kernels.laws import processed_probs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAWS = {
    "greedy": (Sampling(), "rejection"),
    "greedy, penalty": (Sampling(repetition_penalty=1.2), "rejection"),
    "drawn": (Sampling(temperature=1.0, seed=2), "rejection"),
    "all processors": (
        Sampling(temperature=1.1, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=3),
        "rejection",
    ),
    "gumbel": (Sampling(temperature=1.0, seed=4), "gumbel"),
}
ARMS = [("both", 3), ("lm", 2), ("other", 4), ("ngram", 4), ("few", 2), (OFF, 0)]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
NAMES = ("ngram", "lm", "both", "other", "few")


ENDLESS = {"eos_token_id": None, "pad_token_id": None}  # texts that their budget alone ends


def make_target(exactness: str = "law", **changes: Any) -> NativeTarget:
    shape = {"num_hidden_layers": 1, **HEADS, **changes}
    model = build("Llama", dtype=torch.bfloat16, **shape).to("cuda")
    return NativeTarget(model, None, "m", exactness=exactness, kernels=True)


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """What verifies or draws in PyTorch raises."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the reference was asked for on CUDA")

    monkeypatch.setattr(kernels.reference, "verify", refuse)
    monkeypatch.setattr(kernels.reference, "processed_probs", refuse)
    monkeypatch.setattr(kernels.laws, "processed_probs", refuse)
    monkeypatch.setattr(kernels.coupled_reference, "couple", refuse)


@pytest.fixture
def never_waits() -> Iterator[Callable[[], None]]:
    """From its call on, whatever waits for the device is an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def warm_decoder(law: Sampling, coupling: str, prompts: list[list[int]], size: int) -> Any:
    """A decoder that has captured what these texts need."""
    target = make_target(**ENDLESS)
    decoder = SpeculativeDecoder(target, pool(*NAMES), Arms(*ARMS), coupling=coupling)
    assert isinstance(decoder._runner(), DeviceEngine)
    for _ in range(2):  # caches grow in the first, which forgets what was captured
        decoder.generate(prompts, size, law)
    return decoder


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_hundred_steps_wait_for_nothing(
    name: str, num_rows: int, never_waits: Callable[[], None]
) -> None:
    law, coupling = LAWS[name]
    prompts = [ids(5 + 40 * row, row) for row in range(num_rows)]
    decoder = warm_decoder(law, coupling, prompts, 400)
    wanted = decoder.generate(prompts, 400, law).token_ids
    never_waits()
    result = decoder.generate(prompts, 400, law)
    assert sum(len(records) for records in result.records) >= 100 * num_rows
    assert result.token_ids == wanted


def test_a_step_is_one_copy_each_way() -> None:
    decoder = warm_decoder(Sampling(), "rejection", [ids(5)], 120)
    copies: dict[str, int] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = decoder.generate([ids(5)], 120)
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.key.startswith("Memcpy"):
            kind = event.key.split()[1]
            copies[kind] = copies.get(kind, 0) + event.count
    steps = len(result.records[0]) + 1  # one may have been queued past the end
    assert copies["DtoH"] <= steps
    # One a step, and two of the request; drafters that read ahead have their own.
    assert copies["HtoD"] <= steps + 2 + 2 * len(NAMES)


def test_captured_steps_say_what_they_hold() -> None:
    decoder = warm_decoder(Sampling(), "rejection", [ids(5)], 60)
    engine = decoder._runner()
    assert isinstance(engine, DeviceEngine)
    junk = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
    del junk  # cached by the allocator, which the next capture gives back
    decoder.generate([ids(5)], 60, Sampling(temperature=1.0))
    told = engine.steps.graphs.report()
    assert told["count"] > 2
    assert all(one["bytes"] >= 0 for one in told["graphs"].values())
    assert 0 < told["bytes"] < torch.cuda.memory_reserved()
    engine.steps.graphs.clear()
    assert engine.steps.graphs.report()["bytes"] == 0


def test_costs_are_measured_in_captured_steps() -> None:
    target, drafters = make_target("bitwise"), pool(*NAMES)
    costs = quick_costs(target, drafters, SystemClock())
    seconds = [costs.step_seconds(name, k) for name in NAMES for k in (1, 4)]
    assert all(0 < one < 0.1 for one in [*seconds, costs.plain_seconds])
    assert costs.sampled_verify_seconds == {}
    assert all(costs.catch_up_seconds(name, 64) > 0 for name in ("lm", "other", "few", "both"))
    found = SpeculativeDecoder(target, drafters).generate(ids(5), 60).token_ids
    if target.width_dependence is None:
        assert found == generate(target, {}, None, ids(5), 60).token_ids


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("name", ["greedy", "greedy, penalty", "gumbel"])
def test_rows_of_captured_steps_are_each_as_if_alone(name: str) -> None:
    law, coupling = LAWS[name]
    target, prompts = make_target("bitwise"), [ids(9, row) for row in range(5)]
    plain = [generate(target, {}, None, p, 60, law, coupling=coupling) for p in prompts]
    decoder = SpeculativeDecoder(target, pool(*NAMES), Arms(*ARMS, by_row=True), coupling=coupling)
    for _ in range(2):
        found = decoder.generate(prompts, 60, law).token_ids
    if target.width_dependence is None:
        assert found == [result.token_ids[0] for result in plain]


def markov(seed: int) -> Any:
    """A model of 16 tokens whose logits follow from the last one alone."""
    changes = {"vocab_size": 16, "max_position_embeddings": 4096, "eos_token_id": None}
    model = build("Llama", seed, num_hidden_layers=1, pad_token_id=None, **HEADS, **changes)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    return model.to("cuda")


@pytest.mark.parametrize(
    ("law", "coupling"),
    [
        (Sampling(temperature=1.0, seed=1), "rejection"),
        (Sampling(temperature=1.4, top_k=12, top_p=0.97, min_p=0.002, seed=2), "rejection"),
        (Sampling(temperature=1.0, seed=3), "gumbel"),
    ],
)
def test_the_law_is_kept_over_200_000_draws(law: Sampling, coupling: str) -> None:
    from scipy.stats import chi2

    target = NativeTarget(markov(0), None, "m", exactness="law", kernels=True)
    drafters = {"lm": ModelDrafter(markov(1), 16), "ngram": LookupDrafter()}
    rows, length = 64, 3140
    arms = Arms(("lm", 3), ("lm", 1), ("ngram", 2), by_row=False)
    decoder = SpeculativeDecoder(
        target,
        drafters,
        arms,
        coupling=coupling,
        max_rows=rows,  # type: ignore[arg-type]
    )
    names = [f"row {n}" for n in range(rows)]
    prompts = [[n % 16] for n in range(rows)]
    result = decoder.generate(prompts, length, law, request_ids=names)
    accepted = sum(r.num_accepted for records in result.records for r in records)
    drafted = sum(r.num_drafted for records in result.records for r in records)
    assert 0.1 < accepted / drafted < 0.9
    seen = torch.zeros(16, 16, dtype=torch.float64)
    for prompt, text in zip(prompts, result.token_ids, strict=True):
        pairs = torch.tensor([prompt + text[:-1], text])
        seen += torch.bincount(pairs[0] * 16 + pairs[1], minlength=256).view(16, 16)
    assert int(seen.sum()) == rows * length
    logits = torch.stack([target.score([target.open()], [[token]])[0, 0] for token in range(16)])
    columns = {
        "temperature": law.temperature,
        "top_k": law.top_k,
        "top_p": law.top_p,
        "min_p": law.min_p,
    }
    wanted = processed_probs(
        logits.cpu(), **{name: torch.full((16,), value) for name, value in columns.items()}
    )
    expected = wanted * seen.sum(1, keepdim=True)
    assert not bool(seen[wanted == 0].any())
    common = expected >= 5  # where chi-square holds; the rest of a row is one class
    statistic, freedom = 0.0, 0
    for row in range(16):
        found, hoped = seen[row][common[row]], expected[row][common[row]]
        rest, hoped_rest = seen[row][~common[row]].sum(), expected[row][~common[row]].sum()
        if hoped_rest >= 5:
            found, hoped = torch.cat([found, rest[None]]), torch.cat([hoped, hoped_rest[None]])
        statistic += float(((found - hoped) ** 2 / hoped).sum())
        freedom += len(found) - 1
    assert chi2.sf(statistic, freedom) > 1e-5, (statistic, freedom)


def test_a_thousand_random_generations() -> None:
    draw = random.Random(0)
    target, drafters = make_target("bitwise"), pool(*NAMES)
    assert target.kernel_forward is not None
    plain = SpeculativeDecoder(target, tokenizer=Tokens())
    caches = [target.kernel_forward.cache]
    caches += [drafters[name].native.kernel_forward.cache for name in ("lm", "other", "few")]
    decoders = []
    for policy in range(8):
        by_row = policy % 2 == 0
        arms = [draw.choice(ARMS) for _ in range(1 + policy)]
        decoders.append(
            SpeculativeDecoder(
                target,
                drafters,
                Arms(*arms, by_row=by_row),
                tokenizer=Tokens(),
                max_rows=draw.choice([1, 3, 8]),
            )
        )
    known: dict[Any, list[int]] = {}
    for number in range(1000):
        decoder, size = draw.choice(decoders), draw.randint(1, 24)
        seeds = draw.sample(range(40), draw.randint(1, 8))
        stop = draw.choice([(), (), ("ab", "q")])
        prompts = [ids(1 + seed, seed) for seed in seeds]
        found = decoder.generate(prompts, size, stop=stop).token_ids
        for seed, prompt, text in zip(seeds, prompts, found, strict=True):
            key = seed, size, stop
            if key not in known:
                known[key] = plain.generate(prompt, size, stop=stop).token_ids[0]
            assert text == known[key], (number, key)
    gc.collect()
    for cache in caches:
        assert sorted(cache._free) == list(range(cache.num_rows))
