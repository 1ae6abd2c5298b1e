"""Plain greedy decoding of single prompts, ours beside transformers compiled, in turn."""

import json
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from decode.clock import Clock
from decode.native.greedy import write_greedily
from decode.targets.loading import load_causal_lm
from decode.targets.transformers import TransformersTarget
from pipeline.bench_arms import COMPILED, compiled_way
from pipeline.bench_forward import QUESTIONS, Text, Way, decoder_way, median_ratio
from pipeline.bench_passes import Engine
from pipeline.chat import prompt_ids
from pipeline.progress import progress

ENGINE = "native, on the device"


def engine_way(engine: Engine, clock: Clock) -> Way:
    """Plain decoding whose tokens never wait for the host."""

    def write(prompt: list[int], max_new_tokens: int) -> Text:
        times: list[float] = []
        eos = engine.target.eos_token_ids
        (text,) = write_greedily(
            engine.forward, [prompt], max_new_tokens, eos, lambda: times.append(clock.now())
        )
        # The step that was under way when the text ended is not waited for.
        return Text(text, times[len(text) - 1] - times[0])

    return write


def compiled_text(target: TransformersTarget, clock: Clock, num_positions: int) -> Way:
    """transformers compiled, as the other suites have it; its first pass gives one token."""
    way = compiled_way(target, clock, num_positions)

    def write(prompt: list[int], max_new_tokens: int) -> Text:
        written = way(prompt, max_new_tokens)
        return Text(written.token_ids, written.seconds)

    return write


def texts_in_turn(
    engine: Engine, dtype: str, max_new_tokens: int, num_prompts: int, clock: Clock
) -> dict[str, Any]:
    """By way: seconds of its first call, median tokens a second, equal texts."""
    model = load_causal_lm(engine.name, getattr(torch, dtype)).to(engine.device)
    theirs = TransformersTarget(model, engine.tokenizer, engine.name)
    prompts = prompt_list(engine.tokenizer, num_prompts)
    num_positions = max(len(prompt) for prompt in prompts) + max_new_tokens
    ways = {
        COMPILED: compiled_text(theirs, clock, num_positions),
        ENGINE: engine_way(engine, clock),
        "native, decoder": decoder_way(engine.target, clock),
    }
    texts: dict[str, list[Text]] = {name: [] for name in ways}
    first: dict[str, float] = {}
    for name, way in ways.items():
        start = clock.now()
        way(prompts[0], min(8, max_new_tokens))
        first[name] = clock.now() - start
        way(prompts[0], max_new_tokens)
    with progress("engine: texts", len(prompts) * len(ways), "texts") as meter:
        for prompt in prompts:
            for name, way in ways.items():
                texts[name].append(way(prompt, max_new_tokens))
                meter.advance()
    return {name: _told(name, texts, first) for name in ways}


def _told(name: str, texts: Mapping[str, list[Text]], first: Mapping[str, float]) -> Any:
    ours, theirs = texts[name], texts[COMPILED]
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "first_call_seconds": first[name],
        "tokens_per_second": median(text.rate for text in ours),
        "over_compiled": median_ratio(
            [text.rate for text in ours], [text.rate for text in theirs]
        ).plain(),
        "equal_texts": sum(a.token_ids == b.token_ids for a, b in pairs),
        "num_texts": len(ours),
        "num_tokens": sum(len(text.token_ids) for text in ours),
    }


def prompt_list(tokenizer: Any, count: int) -> list[list[int]]:
    """Questions of three domains, in turn, each time a little longer."""
    texts = [
        " ".join([QUESTIONS[i % len(QUESTIONS)]] + ["Be exact."] * (i // len(QUESTIONS)))
        for i in range(count)
    ]
    rows = [
        {"text": text, "messages_json": json.dumps([{"role": "user", "content": text}])}
        for text in texts
    ]
    return [prompt_ids(tokenizer, row) for row in rows]
