"""Digests of file contents: what an identity holds instead of paths and times."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.files import cache_folder, write_json

NOISE = {  # keys of a model's JSON files that say where and by what it was saved, not what it is
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "is_local",
    "local_files_only",
    "_commit_hash",
}
MODEL_FILES = {  # part of a model folder -> the files that make it up
    "weights": ("*.safetensors",),
    "config": (
        "config.json",
        "generation_config.json",
        "modules.json",
        "sentence_bert_config.json",
        "*_Pooling/config.json",
    ),
    "tokenizer": (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
    ),
    "chat_template": ("chat_template.jinja", "chat_template.json"),
    "code": ("*.py",),
}


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes, always read afresh."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path) -> str:
    """Hex digest of a file's bytes, read again only where the file changed since the last time."""
    path = path.resolve()
    stat = path.stat()
    stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    name = hashlib.sha256(str(path).encode()).hexdigest()[:32]
    note = cache_folder() / "digests" / f"{name}.json"
    if note.exists():
        known = json.loads(note.read_text())
        if known["stamp"] == stamp:
            return known["sha256"]
    value = sha256(path)
    note.parent.mkdir(parents=True, exist_ok=True)
    write_json(note, {"path": str(path), "stamp": stamp, "sha256": value})
    return value


def combined(parts: Iterable[tuple[str, str]]) -> str:
    """One digest of several named ones, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()


def model_identity(folder: Path) -> dict[str, str | None]:
    """Digests of a folder's weights, config, tokenizer, chat template and code (None: none)."""
    return {part: _part(folder, patterns) for part, patterns in MODEL_FILES.items()}


def _part(folder: Path, patterns: tuple[str, ...]) -> str | None:
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    if not files:
        return None
    return combined((str(path.relative_to(folder)), _file(path)) for path in files)


def _file(path: Path) -> str:
    """A file's digest; a small JSON file's is of what it says about the model."""
    if not path.name.endswith("config.json"):
        return digest(path)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    said = {key: value for key, value in content.items() if key not in NOISE}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
