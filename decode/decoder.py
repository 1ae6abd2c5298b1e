"""The decoder that people use: a target, a pool of drafters, a policy, and lossless text."""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

from decode.clock import Clock, SystemClock
from decode.device.ready import parts_on_device
from decode.loop import Loop, Row
from decode.native.target import NativeTarget
from decode.noise import Noise, PhiloxNoise
from decode.pool import Pool
from decode.prompts import Prompts, check_prompts, content_ids, read_prompts
from decode.resolve import resolve_drafters, resolve_policy, resolve_target
from decode.results import GenerationResult, Metrics, StreamChunk, summarise
from decode.stopping import Stopper, decode
from decode.targets.choices import AUTO
from decode.types import Drafter, Policy, Prior, Request, Router, Sampling, Target
from decode.verification import select_verifier

if TYPE_CHECKING:
    from decode.device.engine import DeviceEngine
    from decode.device.rows import DeviceRow

T = TypeVar("T", bound=str | None)
COUPLINGS = ("rejection", "gumbel")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """What one request asks for."""

    token_ids: list[int]
    request_id: str
    router_text: str | None
    sampling: Sampling
    stop: tuple[str, ...]
    max_new_tokens: int
    follow_text: bool


class Runner(Protocol):
    """What decodes rows of its own kind, step by step: decode.loop, or decode.device."""

    @property
    def most_rows(self) -> int:
        """Rows of a step at most."""

    @property
    def verifier_name(self) -> str: ...

    def open(
        self, request: Request, prompt: Sequence[int], stopper: Stopper, noise: Noise
    ) -> Any: ...

    def step(self, rows: Sequence[Any]) -> None: ...


class SpeculativeDecoder:
    """Text from a target that is the target's own, at the price of fewer passes.

    With temperature 0 it is the target's greedy text; with sampling it follows the target's law
    exactly. Names do: SpeculativeDecoder("target", "drafter"), or drafters={"code": folder,
    "ngram": "ngram"}. Without drafters it is plain decoding; without a policy the default one, with
    costs measured now.

    With coupling "gumbel" the text follows from the request's seed, whatever is drafted, as long as
    the target's logits do not depend on what is read together (exactness "bitwise"); elsewhere it
    may part where two tokens all but tie.

    Raises ValueError, in one sentence, where the parts do not fit.
    """

    def __init__(
        self,
        target: Target | torch.nn.Module | str | Path,
        drafters: Mapping[str, Drafter | str | Path] | Drafter | str | Path | None = None,
        policy: Policy | str | None = None,
        router: Router | None = None,
        *,
        coupling: str = "rejection",  # gumbel: one seed, one text, whatever is drafted
        noise: Noise | None = None,  # None: Philox streams of each request's own seed
        clock: Clock | None = None,
        tokenizer: Any | None = None,  # None: the target's
        device: str | None = None,
        dtype: torch.dtype | str | None = None,  # None: float32 for a name, a model's own
        backend: str | None = None,  # auto, native, transformers; None: auto for a name
        exactness: str = AUTO,  # bitwise: greedy text to the bit; of the native backend; or law
        max_rows: int = 16,  # requests decoded side by side; more wait
    ) -> None:
        if coupling not in COUPLINGS:
            raise ValueError(f"coupling={coupling} is unknown; use {' or '.join(COUPLINGS)}")
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows} must be at least 1")
        clock = clock or SystemClock()
        self.target = resolve_target(
            target,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            backend=backend,
            exactness=exactness,
        )
        self.tokenizer: Any = tokenizer or getattr(self.target, "tokenizer", None)
        self.pool = Pool(resolve_drafters(drafters, self.target), self.target.vocab_size)
        self.policy = resolve_policy(policy, self.target, self.pool.drafters, clock)
        self.router = router
        self.verifier = select_verifier(self.target.device)
        if coupling == "gumbel" and not holds_bitwise(self.target):
            log.info(
                "coupling=gumbel: texts may part at near ties, since this target rounds by width"
            )
        self.max_rows = max_rows
        self._noise, self._clock, self._coupling = noise, clock, coupling
        self._loop = Loop(self.target, self.pool, self.policy, self.verifier, clock, coupling)
        self._engine: DeviceEngine | None = None
        self._said = False  # that not all drafters draft on the device

    @property
    def drafters(self) -> dict[str, Drafter]:
        """The drafters in use; one that failed is no longer among them."""
        return self.pool.drafters

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        request_ids: Sequence[str] | None = None,
        router_texts: Sequence[str] | None = None,
    ) -> GenerationResult:
        """Texts for all prompts, in their order.

        `prompts` is text, token ids or messages (through the chat template), or a list of either.
        `request_ids` name the noise streams: without them a request is known by its tokens, so that
        its text is the same alone and in a batch. `router_texts` is what the router reads, where
        that is not the prompt itself.
        """
        waiting = deque(
            self._orders(prompts, max_new_tokens, sampling, stop, request_ids, router_texts, False)
        )
        runner = self._runner()
        rows: list[Any] = []
        active: list[Any] = []
        while waiting or active:
            while waiting and len(active) < min(self.max_rows, runner.most_rows):
                active.append(self._open(runner, waiting.popleft()))
                rows.append(active[-1])
            runner.step(active)
            active = [row for row in active if row.stopper.finish_reason is None]
        return GenerationResult(
            token_ids=[row.stopper.token_ids for row in rows],
            texts=[row.stopper.text() for row in rows],
            records=[row.records for row in rows],
            metrics=[self._metrics(runner, row) for row in rows],
        )

    def stream(
        self,
        prompt: Prompts,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        request_id: str | None = None,
        router_text: str | None = None,
    ) -> Iterator[StreamChunk]:
        """One chunk a step for one prompt; their texts joined are the text of generate()."""
        ids = None if request_id is None else [request_id]
        texts = None if router_text is None else [router_text]
        orders = self._orders(prompt, max_new_tokens, sampling, stop, ids, texts, True)
        if len(orders) != 1:
            raise ValueError(f"stream() takes one prompt, not {len(orders)}; generate() takes more")
        return self._stream(orders[0])

    def _stream(self, order: Order) -> Iterator[StreamChunk]:
        runner = self._runner()
        row, shown = self._open(runner, order), 0
        while row.stopper.finish_reason is None or shown < len(row.records):
            if shown == len(row.records):
                runner.step([row])  # on the device the first step's record comes with the second
                continue
            record, shown = row.records[shown], shown + 1
            is_newest = shown == len(row.records)
            reason = row.stopper.finish_reason if is_newest else None
            yield StreamChunk(
                text=row.stopper.take() if is_newest else "",
                token_ids=row.token_ids[record.position :][: record.num_emitted],
                drafter=record.drafter,
                source=record.source,
                num_drafted=record.num_drafted,
                num_accepted=record.num_accepted,
                finish_reason=reason,
                metrics=None if reason is None else self._metrics(runner, row),
            )

    def _runner(self) -> Runner:
        """What decodes: on the device without waiting, where target and all drafters can."""
        found = parts_on_device(self.target, self.pool.drafters)
        if found is None:
            return self._loop
        parts, waiting = found
        if waiting:
            self._say_waits(waiting)
            return self._loop
        from decode.device.engine import DeviceEngine  # Triton is not everywhere

        if self._engine is None or not self._engine.serves(parts):
            self._engine = DeviceEngine(
                cast(NativeTarget, self.target),
                self.pool,
                parts,
                self.policy,
                self._clock,
                self._coupling,
            )
        return self._engine

    def _say_waits(self, names: Sequence[str]) -> None:
        """Say, once, whom the device has to wait for."""
        if not self._said:
            log.info(
                "%s cannot draft on the device: each step waits for the host", ", ".join(names)
            )
        self._said = True

    def _orders(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        sampling: Sampling | None,
        stop: str | Sequence[str],
        request_ids: Sequence[str] | None,
        router_texts: Sequence[str] | None,
        follow_text: bool,
    ) -> list[Order]:
        """One order a prompt. What could be wrong with the call is found here, before decoding."""
        read = read_prompts(prompts, self.tokenizer)
        check_prompts(read, self.target.vocab_size, self.target.max_context)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if stops and self.tokenizer is None:
            raise ValueError(f"stop={stops} needs a tokenizer; pass tokenizer= to the decoder")
        if not all(stops):
            raise ValueError("stop holds an empty string, which every text contains; leave it out")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        ids = _one_each(request_ids, content_ids(read), "request_ids")
        if len(set(ids)) < len(ids):
            raise ValueError("request_ids hold one id twice; they key the noise: give each its own")
        texts = _one_each(router_texts, [prompt.text for prompt in read], "router_texts")
        law = sampling or Sampling()
        return [
            Order(prompt.token_ids, request_id, text, law, stops, max_new_tokens, follow_text)
            for prompt, request_id, text in zip(read, ids, texts, strict=True)
        ]

    def _open(self, runner: Runner, order: Order) -> "Row | DeviceRow":
        """The row of an order, its prompt read."""
        length = len(order.token_ids)
        stopper = Stopper(
            tokenizer=self.tokenizer,
            stop=order.stop,
            eos_token_ids=self.target.eos_token_ids,
            max_new_tokens=order.max_new_tokens,
            num_prompt_tokens=length,
            max_context=self.target.max_context,
            follow_text=order.follow_text,
        )
        request = Request(
            order.request_id, length, order.max_new_tokens, order.sampling, self._prior(order)
        )
        noise = self._noise or PhiloxNoise(order.sampling.seed)
        return runner.open(request, order.token_ids, stopper, noise)

    def _prior(self, order: Order) -> Prior | None:
        if self.router is None:
            return None
        text = order.router_text
        if text is None:
            text = "" if self.tokenizer is None else decode(self.tokenizer, order.token_ids)
        return self.router.prior(text, len(order.token_ids), order.sampling)

    def _metrics(self, runner: Runner, row: "Row | DeviceRow") -> Metrics:
        assert row.stopper.finish_reason is not None
        return summarise(
            row.records,
            num_prompt_tokens=row.request.num_prompt_tokens,
            prefill_seconds=row.prefill_seconds,
            finish_reason=row.stopper.finish_reason,
            verifier=runner.verifier_name,
            backend=self.target.backend,
        )


def holds_bitwise(target: Target) -> bool:
    """Whether a token's logits are the same whatever is read beside it, as far as is known."""
    exactness = getattr(target, "exactness", "law")
    return exactness == "bitwise" and getattr(target, "width_dependence", None) is None


def _one_each(given: Sequence[str] | None, made: Sequence[T], name: str) -> Sequence[str | T]:
    if given is None:
        return made
    if len(given) != len(made):
        raise ValueError(f"{name} has {len(given)} entries for {len(made)} prompts; give one each")
    return given
