"""How fast training is: seconds of a step by phase, tokens a second, and the share of the peak.

Floating point operations of a step, a multiplication with its addition counted as two (compare
arXiv 2204.02311, appendix B), for R tokens read, padding left out, N tokens predicted, and
P = sum of L (L + 1) / 2 over texts of L tokens, the pairs that causal attention looks at:

    pass forward   F = 2 w R + 2 h N + 4 a P
    drafter        3 F, less 2 (w' R + h' N) for the weights w' and h' that are not trained
    target         F, where it is in the loop

w: weights of linear layers below the head; h: of the head; a: layers x heads x head size. What is
computed twice (gradient checkpointing, the drafter's own writing) and what is small beside this
(norms, softmax, the loss itself, the optimizer) is not counted. Dense models only: every expert of
a mixture would count.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from decode.clock import Clock, SystemClock
from drafters.batches import Batch
from drafters.networks import DraftNetwork

PHASES = ("data", "teacher", "forward", "backward", "optimizer")
SPEEDS = ("tokens_per_second", "answer_tokens_per_second", "tflops_per_second", "step_seconds")


@dataclass(frozen=True)
class Work:
    """What a batch asks for, in the letters above."""

    num_read: float
    num_predicted: float
    num_pairs: float

    @classmethod
    def of(cls, batch: Batch) -> "Work":
        """Counted from the batch, best before it is on a GPU."""
        mask = batch.attention_mask.bool()
        places = mask.cumsum(1) - 1 if batch.position_ids is None else batch.position_ids
        pairs = (places + 1)[mask].sum()
        return cls(float(mask.sum()), float(batch.num_tokens), float(pairs))

    def __add__(self, other: "Work") -> "Work":
        sums = (a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        return Work(*sums)


@dataclass(frozen=True)
class Weights:
    """Numbers of a causal LM that its operations follow from."""

    linear: int  # w
    head: int  # h
    attention: int  # a
    linear_frozen: int  # w'
    head_frozen: int  # h'

    @classmethod
    def of_drafter(cls, network: DraftNetwork) -> "Weights":
        head = network.head_weight() if network.splits else None
        # A cut may have its donor's embedding and head beside its trunk.
        below: nn.Module = getattr(network, "trunk", network)
        return cls._of(below, head, network.model_config)

    @classmethod
    def of_model(cls, model: Any) -> "Weights":
        """Of a Hugging Face causal LM."""
        output = model.get_output_embeddings()
        return cls._of(model, None if output is None else output.weight, model.config)

    @classmethod
    def _of(cls, network: nn.Module, head: torch.Tensor | None, config: Any) -> "Weights":
        kinds = ("Linear", "Conv1D")  # and what is derived from them, as adapted layers' own
        layers: list[Any] = [
            module
            for module in network.modules()
            if any(base.__name__ in kinds for base in type(module).__mro__)
        ]
        linear = [layer.weight for layer in layers if layer.weight is not head]
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        frozen_head = head is not None and not head.requires_grad
        return cls(
            linear=sum(weight.numel() for weight in linear),
            head=0 if head is None else head.numel(),
            attention=config.num_hidden_layers * heads * size,
            linear_frozen=sum(w.numel() for w in linear if not w.requires_grad),
            head_frozen=head.numel() if head is not None and frozen_head else 0,
        )

    def forward_flops(self, work: Work) -> float:
        linear = 2 * (self.linear * work.num_read + self.head * work.num_predicted)
        return linear + 4 * self.attention * work.num_pairs

    def training_flops(self, work: Work) -> float:
        spared = self.linear_frozen * work.num_read + self.head_frozen * work.num_predicted
        return 3 * self.forward_flops(work) - 2 * spared


class StepTimer:
    """Seconds of one step by phase, without waiting for the device in between.

    On a GPU with the system's clock by CUDA events, which are read when the step is over; else by
    the clock. The loss computes the head's gradients as it goes, so they count as forward.
    """

    def __init__(self, clock: Clock, on_gpu: bool) -> None:
        self.clock = clock
        self.events = on_gpu and isinstance(clock, SystemClock)
        self._spans: list[tuple[str, Any, Any]] = []
        self._started = 0.0

    def start(self) -> None:
        self._spans, self._started = [], self.clock.now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self._mark()
        yield
        self._spans.append((name, before, self._mark()))

    def read(self) -> dict[str, float]:
        """{"step_seconds": ..., "seconds/<phase>": ...}; the device must be done with the step."""
        seconds = {f"seconds/{name}": 0.0 for name in PHASES}
        for name, before, after in self._spans:
            seconds[f"seconds/{name}"] += (
                before.elapsed_time(after) / 1000 if self.events else after - before
            )
        return {"step_seconds": self.clock.now() - self._started, **seconds}

    def _mark(self) -> Any:
        if not self.events:
            return self.clock.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def speeds(work: Work, flops: float, seconds: Mapping[str, float]) -> dict[str, float]:
    """The curves of one step."""
    step = seconds["step_seconds"]
    return {
        "tokens_per_second": work.num_read / step,
        "answer_tokens_per_second": work.num_predicted / step,
        "tflops_per_second": flops / step / 1e12,
        **seconds,
    }


def summary(
    lines: Sequence[Mapping[str, float]], num_devices: int, peak_flops: float | None
) -> dict[str, float]:
    """Medians over all steps; where the device's peak is known, the share of it that was used."""
    steps = [line for line in lines if "step_seconds" in line]
    if not steps:
        return {}
    found = {name: median(line[name] for line in steps) for name in SPEEDS}
    for name in PHASES:
        found[f"{name}_seconds"] = median(line[f"seconds/{name}"] for line in steps)
    if peak_flops is not None:
        used = found["tflops_per_second"] * 1e12
        found["flop_utilisation"] = used / (num_devices * peak_flops)
    return found
