"""Plain decoding of many prompts in fixed shapes: how a GPU answers tens of thousands of rows.

B rows sit in slots. All of them append at the same column of a ring of L columns, whose number
grows by one a step; a mask says which columns are a row's own, and rotary positions are the row's,
not the column's, so a prompt that moves into a slot ends wherever the ring stands. A row never
holds L tokens, so what is overwritten is nobody's.

Shapes never change, so one step is one CUDA graph; the host looks at the tokens once in STEPS
steps, ends rows and fills free slots. Prompts are read without their last token, which the next
step reads with everybody else's: no logits but a step's are ever needed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernels.ring_attention import ring_attention, tiles
from pipeline.generation import (
    EOS,
    LENGTH,
    Choice,
    Job,
    Trace,
    choose,
    joined,
    pad_left,
    refuse_no_numbers,
)

STEPS = 16  # between two looks; a row that has ended idles for half of them
FILL_SHARE = 1 / 16  # of the slots: so many are free before prompts are read, or nothing else is on
PREFILL_TOKENS = 65_536  # padding included, of one pass over prompts
ATTENTION = "outrider_grouped"  # the name under which transformers finds `grouped_attention`


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,  # [B, heads, T, D]
    key: Tensor,  # [B, key heads, L, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:  # [B, T, heads, D]
    """Attention of one new token a row with the heads of a group as rows: keys are read once."""
    batch, heads, width, size = query.shape
    if width != 1 or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **others
        )
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], size)
    scale = size**-0.5 if scaling is None else scaling
    if query.is_cuda and tiles(size):
        out = ring_attention(grouped, key, value, attention_mask[:, 0, 0], scale)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scale
        )
    return out.reshape(batch, 1, heads, size), None


class RingLayer(CacheLayerMixin):
    """Keys and values [B, key heads, L, D] of one layer; every update lands in the same column."""

    def __init__(self, num_columns: int, column: Tensor) -> None:
        super().__init__()
        self.num_columns = num_columns
        self.column = column  # [1] int64, shared by all layers and advanced by their owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate from the shapes of the first keys and values [B, key heads, 1, D]."""
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.num_columns, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.column, key_states)
        self.values.index_copy_(2, self.column, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_columns, 0

    def get_seq_length(self) -> int:
        return 0  # positions and mask are always given

    def get_max_length(self) -> int:
        return self.num_columns


@dataclass(slots=True)
class Row:
    """A job in a slot, and what has come of it."""

    shard: int
    place: int
    job: Job
    uniforms: list[float]
    done: int = 0  # tokens chosen so far
    parts: list[Choice] = field(default_factory=list)  # each [n, ...]


class SlotGenerator:
    """A causal LM of transformers that keeps `num_slots` rows busy."""

    def __init__(
        self,
        model: Any,
        eos_token_ids: frozenset[int],
        num_top_logits: int,
        num_slots: int,
        longest: int,  # prompt and answer of any job, in tokens
    ) -> None:
        if not fixed_shapes_fit(model):
            raise ValueError(
                f"{type(model).__name__} does not attend to all earlier tokens in every layer; "
                "use stages.regenerate.engine=padded"
            )
        AttentionInterface.register(ATTENTION, grouped_attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.set_attn_implementation(ATTENTION)
        self.model, self.num_top_logits = model, num_top_logits
        self.device = next(model.parameters()).device
        self.eos = torch.tensor(sorted(eos_token_ids), dtype=torch.long)
        self.rows: list[Row | None] = [None] * num_slots
        columns = -(-(longest + STEPS) // 8) * 8  # kernels want masks of 8 columns
        self.column = torch.zeros(1, dtype=torch.long, device=self.device)
        self.place = 0  # the host's copy of `column`
        self.mask = torch.zeros(num_slots, columns, dtype=torch.bool, device=self.device)
        self.ids = torch.zeros(num_slots, dtype=torch.long, device=self.device)
        self.positions = torch.zeros_like(self.ids)
        depth = model.config.num_hidden_layers
        self.ring: Any = Cache(layers=[RingLayer(columns, self.column) for _ in range(depth)])
        self._forward: Callable[[], Tensor] = self._capture() if self._on_gpu else self._step

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @torch.inference_mode()
    def stream(self, shards: Iterable[Sequence[Job]]) -> Iterator[tuple[int, int, Trace]]:
        """Answers as rows end; a shard's last rows share the slots with the next one's first."""
        waiting = (
            (n, place, job) for n, jobs in enumerate(shards) for place, job in enumerate(jobs)
        )
        while True:
            free = [slot for slot, row in enumerate(self.rows) if row is None]
            if len(free) >= max(1, FILL_SHARE * len(self.rows)):
                self._fill(free, list(islice(waiting, len(free))))
            if not any(self.rows):
                return
            yield from self._read(self._run())

    # ------------------------------------------------------------------------------------ device

    def _step(self) -> Tensor:  # [B, V]
        """Everybody's next token read; the law of the one after it."""
        self.mask.index_fill_(1, self.column, True)
        out = self.model(
            input_ids=self.ids[:, None],
            attention_mask=self.mask[:, None, None],
            position_ids=self.positions[:, None],
            past_key_values=self.ring,
            use_cache=True,
            logits_to_keep=1,
        )
        self.column.add_(1).remainder_(self.mask.shape[1])
        self.positions.add_(1)
        return out.logits[:, -1]

    @torch.inference_mode()
    def _capture(self) -> Callable[[], Tensor]:
        """`_step` as a CUDA graph whose logits are always the same tensor."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries choose and allocate before anything is recorded
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._step()
        self.column.zero_()
        self.mask.zero_()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    def _run(self) -> Choice:  # of [STEPS, B, ...], on the CPU
        """STEPS tokens for every slot; nothing waits for the host but the copy at the end."""
        drawn = [n for n, row in enumerate(self.rows) if row is not None and row.uniforms]
        busy = [row for row in (self.rows[slot] for slot in drawn) if row is not None]
        samplings = tuple(row.job.sampling for row in busy)
        steps = []
        for step in range(STEPS):
            uniforms = [row.uniforms[min(row.done + step, len(row.uniforms) - 1)] for row in busy]
            choice = choose(self._forward(), samplings, drawn, uniforms, self.num_top_logits)
            self.ids.copy_(choice.token_ids)
            steps.append(choice)
        self.place = (self.place + STEPS) % self.mask.shape[1]
        return Choice(*(torch.stack(columns).cpu() for columns in zip(*steps, strict=True)))

    # -------------------------------------------------------------------------------------- host

    def _read(self, choice: Choice) -> Iterator[tuple[int, int, Trace]]:
        """Hand the tokens to their rows; the rows that end leave their slots."""
        ends = torch.isin(choice.token_ids, self.eos)  # [STEPS, B]
        first = torch.where(ends.any(0), ends.byte().argmax(0), STEPS).tolist()
        for slot, row in enumerate(self.rows):
            if row is None:
                continue
            room = row.job.max_new_tokens - row.done
            taken = min(first[slot] + 1, room, STEPS)
            row.parts.append(Choice(*(column[:taken, slot] for column in choice)))
            refuse_no_numbers(row.parts[-1].lse, [row.job.key] * taken)
            row.done += taken
            ended = first[slot] < taken
            if ended or row.done == row.job.max_new_tokens:
                self.rows[slot] = None
                trace = joined(row.parts, EOS if ended else LENGTH)
                yield row.shard, row.place, trace

    def _fill(self, free: Sequence[int], jobs: Sequence[tuple[int, int, Job]]) -> None:
        """Put jobs into free slots, in passes of prompts of like length."""
        order = sorted(jobs, key=lambda entry: -len(entry[2].prompt_ids))
        slots, start = list(free), 0
        while start < len(order):
            width = max(1, len(order[start][2].prompt_ids))
            batch = order[start : start + max(1, PREFILL_TOKENS // width)]
            self._prefill(slots[start : start + len(batch)], [entry[2] for entry in batch])
            for slot, (shard, place, job) in zip(slots[start:], batch, strict=False):
                drawn = [] if job.sampling.greedy else job.uniforms()
                self.rows[slot] = Row(shard, place, job, drawn)
            start += len(batch)

    def _prefill(self, slots: Sequence[int], jobs: Sequence[Job]) -> None:
        """Read all of the prompts but their last tokens into the columns that end before now."""
        rows = torch.tensor(slots, device=self.device)
        prompts = [job.prompt_ids for job in jobs]
        lasts = torch.tensor([prompt[-1] for prompt in prompts], device=self.device)
        self.ids[rows] = lasts
        self.positions[rows] = torch.tensor([len(p) - 1 for p in prompts], device=self.device)
        self.mask[rows] = False
        if max(map(len, prompts)) == 1:
            return
        ids, mask = pad_left([prompt[:-1] for prompt in prompts], self.device)
        cache: Any = DynamicCache()
        self.model.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        )
        width, columns = ids.shape[1], self.mask.shape[1]
        places = torch.arange(self.place - width, self.place, device=self.device) % columns
        where = (rows[:, None], slice(None), places[None])
        for ring, read in zip(self.ring.layers, cache.layers, strict=True):
            if not ring.is_initialized:  # no step has been taken, as on a CPU
                like = (rows_of(t, len(self.rows)) for t in (read.keys, read.values))
                ring.lazy_initialization(*like)
            ring.keys[where] = read.keys.transpose(1, 2)
            ring.values[where] = read.values.transpose(1, 2)
        self.mask[rows[:, None], places[None]] = mask.bool()


def rows_of(states: Tensor, num_rows: int) -> Tensor:
    """The shape of one new column's keys or values [num_rows, key heads, 1, D]."""
    return states[:1, :, :1].expand(num_rows, -1, -1, -1)


def fixed_shapes_fit(model: Any) -> bool:
    """Whether every layer attends to all earlier tokens, and to nothing but them."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    slides = window is not None and getattr(config, "use_sliding_window", True)
    return kinds == {"full_attention"} and not slides and hasattr(model, "model")
