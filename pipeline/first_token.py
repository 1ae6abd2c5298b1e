"""A new process that loads a model and writes: what `pipeline.bench_first_token` starts and times.

    python -m pipeline.first_token WAY TARGET DTYPE DEVICE MAX_NEW_TOKENS

Prints a line when each of the first two tokens is there, and at the end the device memory it holds.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

WAYS = ("native", "transformers", "compiled")
PROMPT = "Write a function that returns the n-th Fibonacci number."
TOKEN = "token"  # the line of a token

Arrived = Callable[[], None]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def write_native(name: str, dtype: str, device: str, count: int) -> dict[str, int]:
    """Through the native backend, plain; bytes of weights and cache."""
    from decode import SpeculativeDecoder

    decoder = SpeculativeDecoder(
        name, device=device, dtype=dtype, backend="native", exactness="bitwise"
    )
    for chunk in decoder.stream(PROMPT, count):
        for _ in chunk.token_ids:
            say(TOKEN)
    target: Any = decoder.target
    return {"weights": target.weight_bytes, "cache": target.cache_bytes}


def write_theirs(name: str, dtype: str, device: str, count: int, **options: Any) -> dict[str, int]:
    """transformers' own greedy loop; `options` are those of its generate()."""
    import torch

    from decode.targets.loading import load_causal_lm, load_tokenizer

    model = load_causal_lm(name, getattr(torch, dtype)).to(device)
    ids = load_tokenizer(name)(PROMPT, return_tensors="pt").input_ids.to(device)

    def note(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        input_ids[:, -1].tolist()  # it is there
        say(TOKEN)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            stopping_criteria=[note],
            **options,
        )
    return {"weights": sum(p.numel() * p.element_size() for p in model.parameters()), "cache": 0}


def main() -> None:
    way, name, dtype, device, count = sys.argv[1:]
    options = {"cache_implementation": "static"} if way == "compiled" else {}
    write: Any = write_native if way == "native" else write_theirs
    held = write(name, dtype, device, int(count), **options)
    if device.startswith("cuda"):
        import torch

        free, total = torch.cuda.mem_get_info()
        held |= {"reserved": torch.cuda.memory_reserved(), "used_on_device": total - free}
    say(json.dumps(held))


if __name__ == "__main__":
    main()
