"""Ways to write one text greedily, ours and others', each with when its tokens came.

A way is called with a prompt and the most new tokens; it says what it wrote and how long it took
from the first tokens on, so that prefill stands apart. Every way runs on the same weights in the
same type, and ends a text at its EOS.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from decode import SpeculativeDecoder
from decode.clock import Clock
from decode.policies.fixed import FixedPolicy
from decode.results import ratio
from decode.targets.transformers import TransformersTarget
from decode.types import Drafter, Policy, Router
from pipeline.bench_greedy import own_text

log = logging.getLogger(__name__)

EAGER, COMPILED = "transformers eager", "transformers compiled"
ASSISTED, LOOKUP = "transformers assisted", "transformers prompt lookup"
FLASHSPEC = "FlashSpec"
PEERS = {
    "eager": EAGER,
    "compiled": COMPILED,
    "assisted": ASSISTED,
    "lookup": LOOKUP,
    "flashspec": FLASHSPEC,
}
LOOKUP_TOKENS = 10  # what transformers' documentation proposes


@dataclass(frozen=True, slots=True)
class Written:
    """One text and its time."""

    token_ids: list[int]
    seconds: float  # from its first tokens to its last
    num_first: int  # tokens that the first pass gave
    first_seconds: float  # from the call to them: prefill and the first pass
    num_passes: int | None  # of the target, the first one included; None: not told

    @property
    def rate(self) -> float:
        """Tokens a second after the first pass; NaN for a text that ended with it."""
        return ratio(len(self.token_ids) - self.num_first, self.seconds)


Way = Callable[[list[int], int], Written]


@dataclass(frozen=True, slots=True)
class Arm:
    """A way that is made when it is first needed, which is part of its first call."""

    name: str
    make: Callable[[], Way]
    is_ours: bool


def own_arm(
    name: str,
    target: Any,
    clock: Clock,
    drafters: Mapping[str, Drafter] | None = None,
    policy: Callable[[], Policy] | None = None,
    router: Router | None = None,
) -> Arm:
    """The decoder that people use; one of it for all texts, as people have it."""

    def make() -> Way:
        decoder = SpeculativeDecoder(
            target, drafters, None if policy is None else policy(), router, clock=clock
        )
        return decoder_way(decoder, clock)

    return Arm(name, make, True)


def fixed_arm(name: str, drafter: Drafter, k: int, target: Any, clock: Clock) -> Arm:
    """One drafter that always proposes K tokens."""
    policy = partial(FixedPolicy, name, k, None)
    return own_arm(f"{name}, K={k}", target, clock, {name: drafter}, policy)


def decoder_way(decoder: SpeculativeDecoder, clock: Clock) -> Way:
    """`generate` of one prompt. The whole call counts, but for what its metrics say of the prompt
    and the first pass.
    """

    def write(prompt: list[int], max_new_tokens: int) -> Written:
        start = clock.now()
        done = decoder.generate([prompt], max_new_tokens)
        spent = clock.now() - start
        if decoder.pool.dropped:
            raise ValueError(f"a drafter failed: {decoder.pool.dropped}")
        (metrics,), (records,) = done.metrics, done.records
        first = metrics.first_token_seconds
        passes = metrics.num_target_passes
        return Written(done.token_ids[0], spent - first, records[0].num_emitted, first, passes)

    return write


class Arrivals:
    """When transformers hands over the prompt, and then new tokens: a streamer."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(self.clock.now())
        self.counts.append(value.numel())

    def end(self) -> None:
        """The text is whole."""


def generate_way(target: TransformersTarget, clock: Clock, **options: Any) -> Way:
    """transformers' own `generate`, whose tokens reach the host as they come."""

    def write(prompt: list[int], max_new_tokens: int) -> Written:
        arrivals, start = Arrivals(clock), clock.now()
        ids = own_text(target, prompt, max_new_tokens, streamer=arrivals, **options)
        times, counts = arrivals.times[1:], arrivals.counts[1:]
        return Written(ids, times[-1] - times[0], counts[0], times[0] - start, len(times))

    return write


def compiled_way(target: TransformersTarget, clock: Clock, num_positions: int) -> Way:
    """The same over a static cache, which it compiles on a GPU; one cache, since another length
    would be compiled anew.
    """
    from transformers import StaticCache

    cache = StaticCache(config=target.model.config, max_cache_len=num_positions)
    write = generate_way(target, clock, past_key_values=cache)

    @torch.inference_mode()  # as the cache's tensors are made
    def write_over_it(prompt: list[int], max_new_tokens: int) -> Written:
        if cache.get_seq_length():
            cache.reset()
        return write(prompt, max_new_tokens)

    return write_over_it


def flashspec_way(
    target: TransformersTarget, assistant: Any, clock: Clock, dtype: torch.dtype
) -> Way:
    """FlashSpec (PyPI, read at 0.3.1) with its default strategy: lookup, else the assistant.

    It does not say when tokens come, so a call for one token stands for prefill and first pass. It
    works on copies, since it moves what it is given onto caches of its own.
    """
    if find_spec("flashspec") is None:
        raise ModuleNotFoundError("flashspec is not installed (pip install flashspec==0.3.1)")
    import flashspec
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    device = torch.device(target.device)
    models = [_copied(model) for model in (target.model, assistant)]
    theirs = TargetModel(target.name_or_path, device, dtype, model=models[0])
    drafter = HuggingFaceDrafter("assistant", device, dtype, model=models[1])
    config = flashspec.FlashSpecConfig(
        device=str(device),
        eos_token_ids=tuple(target.eos_token_ids),
        sampling=flashspec.SamplingConfig(temperature=0.0),
    )
    engine = flashspec.SpeculativeEngine(config, [drafter], theirs)
    log.info("FlashSpec %s: %s", version("flashspec"), engine.drafter_strategy_reason)

    def timed(ids: Tensor, most: int) -> tuple[list[int], float]:
        start = clock.now()
        done = engine.generate(ids, max_new_tokens=most)
        tokens = done.output_ids[0, : done.n_tokens_generated].tolist()
        return tokens, clock.now() - start

    def write(prompt: list[int], max_new_tokens: int) -> Written:
        ids = torch.tensor([prompt], device=device)
        _, first = timed(ids, 1)
        tokens, spent = timed(ids, max_new_tokens)
        return Written(tokens, spent - first, 1, first, None)

    return write


def _copied(model: Any) -> Any:
    """The model again, without what transformers has compiled and keeps on it."""
    kept = vars(model).pop("_compiled_call", None)
    try:
        return copy.deepcopy(model)
    finally:
        if kept is not None:
            model._compiled_call = kept


def peer_arms(
    names: list[str],
    target: TransformersTarget,  # of the very weights that ours has
    assistant: Callable[[], Any],  # the model; raises ValueError where none is named
    clock: Clock,
    num_positions: int,
) -> list[Arm]:
    """Those that were asked for, in PEERS' order."""
    dtype = next(target.model.parameters()).dtype
    makers: dict[str, Callable[[], Way]] = {
        "eager": lambda: generate_way(target, clock),
        "compiled": lambda: compiled_way(target, clock, num_positions),
        "assisted": lambda: generate_way(target, clock, assistant_model=assistant()),
        "lookup": lambda: generate_way(target, clock, prompt_lookup_num_tokens=LOOKUP_TOKENS),
        "flashspec": lambda: flashspec_way(target, assistant(), clock, dtype),
    }
    return [Arm(PEERS[name], makers[name], False) for name in PEERS if name in names]
