"""Pieces of HTML that need no other file: tables, pictures, lists, marked texts. All is escaped."""

import base64
import html
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

SAMPLE_STYLE = """\
.sample { font: .85rem/1.6 ui-monospace, monospace; margin: 0; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; }
.accepted { background: #c4e3c8; border-radius: 3px; box-shadow: inset 0 0 0 1px #7fb98a; }
.refused { border-bottom: 2px dotted #c0562f; }
"""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def image(path: Path | None) -> str:
    """The picture inside the page itself; empty where there is none."""
    if path is None:
        return ""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">'


def bullets(lines: Sequence[str]) -> str:
    """A list; empty where there is nothing to say."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def spans(marked: Sequence[Sequence[str]], is_cut: bool) -> str:
    """A text of [kind, text] spans, each kind a class; an ellipsis where the text goes on."""
    parts = [
        f'<span class="{html.escape(kind)}">{html.escape(text)}</span>' for kind, text in marked
    ]
    return f'<p class="sample">{"".join(parts)}{" …" if is_cut else ""}</p>'


def bracketed(marked: Sequence[Sequence[str]]) -> str:
    """The same without colours, for places that hold plain text: accepted spans in brackets."""
    return "".join(f"⟦{text}⟧" if kind == "accepted" else text for kind, text in marked)


def samples(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sample rows, those of one prompt and law together, the first open."""
    blocks: list[str] = []
    for (_, temperature), group in groupby(rows, lambda row: (row["id"], row["temperature"])):
        own = list(group)
        title = f"{own[0]['domain']}, temperature {temperature:g}: {_short(own[0]['prompt'])}"
        texts = "".join(_sample(row) for row in own)
        is_open = "" if blocks else " open"
        blocks.append(f"<details{is_open}><summary>{html.escape(title)}</summary>{texts}</details>")
    return "".join(blocks)


def _sample(row: Mapping[str, Any]) -> str:
    title = (
        f"{row['drafter']}, K={row['num_draft_tokens']}: "
        f"{row['acceptance_length']:.2f} tokens a pass"
    )
    return f"<h4>{html.escape(title)}</h4>{spans(row['spans'], row['is_cut'])}"


def _short(text: str, limit: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
