"""Stage decode: text for a prompt, a file or standard input, streamed, with the drafter of each
span.
"""

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.text import Text

from decode import SpeculativeDecoder, StreamChunk
from decode.resolve import DESCRIPTION
from decode.results import Metrics, ratio
from decode.types import OFF, Sampling
from pipeline.config import ConfigError
from pipeline.load import load_decoder
from pipeline.models import Source
from pipeline.stage import Need, Stage, Workspace

log = logging.getLogger(__name__)

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
KINDS_BY_NAME = ("ngram",)  # drafters that need no files


@dataclass(frozen=True, kw_only=True)
class Decode(Stage):
    """Streams to the terminal; keeps the texts and figures of this run beside its manifest."""

    summary: ClassVar[str] = "text for a prompt, a file or stdin, with the drafter of each span"
    repeats: ClassVar[bool] = True

    prompt: str | None
    file: str | None
    target: str | None
    backend: str | None
    drafter: str | None
    policy: str | None
    coupling: str
    chat: bool
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    stop: list[str]

    def __post_init__(self) -> None:
        if self.prompt is not None and self.file is not None:
            raise ConfigError(
                "stages.decode.prompt and stages.decode.file are both given; drop one"
            )
        if self.drafter is not None and self.target is None:
            raise ConfigError(
                f"stages.decode.drafter={self.drafter} needs stages.decode.target as well; "
                "without a target the export's own drafters are used"
            )

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        return {"export": Need("export")} if self.target is None else {}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        prompts = list(self._prompts())
        for number, prompt in enumerate(prompts, start=1):
            if not (_shown(prompt) or "").strip():
                raise ValueError(f"prompt {number} is empty; give some text to answer")
        decoder = self._decoder(workspace)
        sampling = Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=workspace.seed,
        )
        out = Console(highlight=False)
        rows = []
        for prompt in prompts:
            if len(prompts) > 1:
                out.print(Text(f"\n> {_shown(prompt)}", style="bold"), soft_wrap=True)
            chunks = decoder.stream(
                self._through_template(prompt, decoder), self.max_new_tokens, sampling, self.stop
            )
            text, metrics = show(chunks, out, palette(decoder))
            rows.append({"prompt": prompt, "text": text, "metrics": asdict(metrics)})
        if out.is_terminal:
            out.print(legend(decoder))
        with (workspace.out / "texts.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return totals([row["metrics"] for row in rows])

    def _decoder(self, workspace: Workspace) -> SpeculativeDecoder:
        device, clock = workspace.runtime.resolved_device(), workspace.runtime.make_clock()
        if self.target is None:
            return load_decoder(
                workspace.inputs["export"],
                policy=self.policy,
                device=device,
                backend=self.backend,
                coupling=self.coupling,
                clock=clock,
            )
        named = None if self.drafter is None else {_short(self.drafter): local(self.drafter)}
        return SpeculativeDecoder(
            local(self.target),
            named,
            self.policy,
            device=device,
            backend=self.backend,
            coupling=self.coupling,
            clock=clock,
        )

    def _prompts(self) -> Iterator[Any]:
        """Text, or a list of messages, for each prompt."""
        if self.prompt is not None:
            yield self.prompt
        elif self.file is not None:
            yield from read_lines(Path(self.file))
        else:
            if sys.stdin.isatty():
                log.info("type a prompt, then Ctrl-D on a line of its own")
            text = sys.stdin.read().strip()
            if not text:
                raise ValueError("standard input holds no prompt; add stages.decode.prompt=TEXT")
            yield text

    def _through_template(self, prompt: Any, decoder: SpeculativeDecoder) -> Any:
        if isinstance(prompt, str) and self.chat and decoder.tokenizer.chat_template:
            return [{"role": "user", "content": prompt}]
        return prompt


def read_lines(path: Path) -> Iterator[Any]:
    """A prompt a line: text, a JSON string, or JSON with "prompt", "text" or "messages"."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); give a text file in UTF-8") from error
    found = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path} holds no prompt; write one a line")
    for number, line in found:
        yield line if line[0] not in '{["' else _from_json(line, f"{path}, line {number}")


def _from_json(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError:
        return line  # text that happens to begin with a bracket or a quote
    if isinstance(value, dict):
        value = next((value[k] for k in ("messages", "prompt", "text") if value.get(k)), None)
    if not value or not (isinstance(value, str) or _are_messages(value)):
        raise ValueError(f'{where} has no prompt; write text, or JSON with "prompt" or "messages"')
    return value


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in value
    )


def local(name: str) -> str:
    """The local folder of a model, fetched if need be; a drafter's kind or folder as it is."""
    if name in KINDS_BY_NAME or (Path(name) / DESCRIPTION).is_file():
        return name
    source = Source(name_or_path=name, revision=None, wheel=None, wheel_sha256=None)
    return str(source.resolve())


def palette(decoder: SpeculativeDecoder) -> dict[str, str]:
    """A colour for each drafter; plain steps have none."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(decoder.drafters)}


def show(
    chunks: Iterator[StreamChunk], out: Console, colours: Mapping[str, str]
) -> tuple[str, Metrics]:
    """Print a stream as it comes; its whole text and its metrics, which the last line tells."""
    text, metrics = "", None
    for chunk in chunks:
        style = colours.get(chunk.drafter, "") if chunk.num_accepted else ""
        out.print(Text(chunk.text, style=style), end="", soft_wrap=True)
        text, metrics = text + chunk.text, chunk.metrics
    out.print()
    assert metrics is not None, "a stream ends with a chunk that holds metrics"
    log.info(
        "%d tokens in %d target passes (acceptance_length %.2f), %.1f tokens/s after %.2f s (%s)",
        metrics.num_new_tokens,
        metrics.num_target_passes,
        metrics.acceptance_length,
        metrics.tokens_per_second,
        metrics.first_token_seconds,
        metrics.finish_reason,
    )
    return text, metrics


def legend(decoder: SpeculativeDecoder) -> Text:
    """Which colour is whose."""
    parts: list[Any] = ["colours: "]
    for name, colour in palette(decoder).items():
        parts += [(name, colour), " drafted, "]
    return Text.assemble(*parts, f"none: {OFF}, or nothing was accepted", style="dim")


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over all prompts, and the rates that follow from the sums."""
    tokens = sum(row["num_new_tokens"] for row in rows)
    return {
        "prompts": len(rows),
        "new_tokens": tokens,
        "acceptance_length": ratio(tokens, sum(row["num_target_passes"] for row in rows)),
        "tokens_per_second": ratio(tokens, sum(row["decode_seconds"] for row in rows)),
    }


def _short(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2] or name


def _shown(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
