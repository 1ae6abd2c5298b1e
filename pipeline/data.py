"""Data sources: local files and data sets of the Hub, as prompt rows."""

import glob
import gzip
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.digests import digest
from pipeline.leaks import HeldOut
from pipeline.models import may_fetch
from pipeline.progress import progress
from pipeline.rows import COLUMNS, Row, RowFormat, fraction

log = logging.getLogger(__name__)

JSON_LINES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
PARQUET = (".parquet",)


class DataSource(Protocol):
    """The config group `data`."""

    def load(self, seed: int) -> dict[str, list[Row]]:
        """Rows by where they belong: prepare splits "train"; other names are splits already."""

    def identity(self) -> dict[str, Any]:
        """What the rows follow from: settings and digests of contents, no paths."""


@dataclass(frozen=True, kw_only=True)
class FileData(RowFormat):
    """JSON lines and parquet files on this machine."""

    train: Any  # a path, a list of them, or {domain: paths}; * and ? match names
    validation: Any
    test: Any

    def load(self, seed: int) -> dict[str, list[Row]]:
        found = {name: list(self._read(files)) for name, files in self.files().items()}
        return {
            name: fewest(rows, self.max_rows_per_domain if name == "train" else 0, seed)
            for name, rows in found.items()
            if rows
        }

    def identity(self) -> dict[str, Any]:
        contents = {
            name: [(domain or stem(path), digest(path), domain is None) for path, domain in files]
            for name, files in self.files().items()
        }
        return {"kind": "files", "format": columns(self), "files": contents}

    def files(self) -> dict[str, list[tuple[Path, str | None]]]:
        """The files of each split and the domain that all of a file's rows are given.

        Raises ValueError for a path that is not there.
        """
        found = {
            name: [
                (path, domain)
                for domain, paths in domains_of(getattr(self, name))
                for path in expand(f"data.{name}", paths)
            ]
            for name in ("train", "validation", "test")
        }
        if not found["train"]:
            raise ValueError("data.train names no file; add data.train=PATH (.jsonl or .parquet)")
        return found

    def _read(self, files: list[tuple[Path, str | None]]) -> Iterator[Row]:
        for path, domain in files:
            with progress(f"prepare: reading {path.name}", None, "rows") as meter:
                for where, raw in read_rows(path):
                    yield self.read(raw, where, domain=stem(path), fixed_domain=domain)
                    meter.advance()


@dataclass(frozen=True, kw_only=True)
class HubData(RowFormat):
    """A data set of the Hugging Face Hub."""

    name_or_path: str
    config: str | None
    revision: str | None
    train: str
    validation: str | None
    test: str | None

    def load(self, seed: int) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for name in ("train", "validation", "test"):
            split = getattr(self, name)
            if split is None:
                continue
            rows = list(self._read(split))
            found[name] = fewest(rows, self.max_rows_per_domain if name == "train" else 0, seed)
        return found

    def identity(self) -> dict[str, Any]:
        splits = [self.train, self.validation, self.test]
        prints = {split: self._load_split(split)._fingerprint for split in splits if split}
        kind = {"kind": "hub", "name": self.name_or_path, "config": self.config}
        return {**kind, "format": columns(self), "revision": self.revision, "contents": prints}

    def _read(self, split: str) -> Iterator[Row]:
        loaded = self._load_split(split)
        with progress(f"prepare: reading {split}", len(loaded), "rows") as meter:
            for number, raw in enumerate(loaded, start=1):
                where = f"{self.name_or_path}, split {split}, row {number}"
                yield self.read(raw, where, self._domain)
                meter.advance()

    @property
    def _domain(self) -> str:
        return self.name_or_path.rstrip("/").split("/")[-1]

    def _load_split(self, split: str) -> Any:
        from datasets import disable_progress_bars, load_dataset

        disable_progress_bars()
        may_fetch(self.name_or_path)
        try:
            return load_dataset(self.name_or_path, self.config, split=split, revision=self.revision)
        except Exception as error:  # the library's own and its network's errors, named
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise ValueError(
                f"data.name_or_path={self.name_or_path}, split {split}, cannot be loaded "
                f"({reason}); check names and connection, or use data=jsonl with local files"
            ) from error


def columns(rows: RowFormat) -> dict[str, Any]:
    """The settings that decide how raw rows are read."""
    return {name: getattr(rows, name) for name in RowFormat.__dataclass_fields__}


def domains_of(value: Any) -> list[tuple[str | None, Any]]:
    """Domain -> paths, where files are given so; else the paths, of no domain in particular."""
    if value is None:
        return []
    return [*value.items()] if isinstance(value, Mapping) else [(None, value)]


def expand(key: str, value: Any) -> list[Path]:
    """The files that a path, a pattern or a list of them names, each once; `key` is the setting."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{key}={value} is no path; give one, or a list as in [a.jsonl,b.jsonl]")
    found: list[Path] = []
    for text in texts:
        paths = sorted(Path(path) for path in glob.glob(str(Path(text).expanduser())))
        if not paths or not all(path.is_file() for path in paths):
            raise ValueError(
                f"{key}={text} is not a file; check the path (from here: {Path.cwd()})"
            )
        for path in paths:
            if not path.name.endswith(JSON_LINES + PARQUET):
                known = ", ".join(JSON_LINES + PARQUET)
                raise ValueError(f"{key}={path} has a format that is not known; use one of {known}")
        found += [path for path in paths if path not in found]
    return found


def stem(path: Path) -> str:
    """A file's name without its endings: the domain of rows that name none."""
    return path.name.split(".")[0] or path.name


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a file of any known format, with its place."""
    return (read_parquet if path.name.endswith(PARQUET) else read_json_lines)(path)


def bench_texts(path: Path) -> Iterator[HeldOut]:
    """All that a benchmark asks: the `turns` of each row, else its `prompt`."""
    for where, raw in read_rows(path):
        turns = raw.get("turns") or [raw.get("prompt")]
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(
                f"{where} has neither a prompt nor turns (it has {', '.join(raw) or 'nothing'}); "
                "a benchmark's row holds its question as prompt, or a list of them as turns"
            )
        yield from (HeldOut(turn, stem(path), where) for turn in turns)


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's place and object; raises ValueError that names file and line."""
    with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
        number = 0
        while True:
            number += 1
            where = f"{path}, line {number},"
            try:
                line = file.readline()
                text = line.decode("utf-8")
                if not line:
                    return
                if number == 1:
                    text = text.removeprefix("\ufeff")  # as some editors begin a file
                raw = json.loads(text) if text.strip() else None
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{where} is not valid UTF-8 (byte {error.start}); save the file as UTF-8"
                ) from error
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where} is not JSON ({error.msg}); write one object a line"
                ) from error
            except (EOFError, OSError) as error:
                raise ValueError(
                    f"{where} cannot be read ({error}); copy the file again"
                ) from error
            if raw is None:
                continue
            if not isinstance(raw, dict):
                raise ValueError(f"{where} is not an object; write one object a line")
            yield where.rstrip(","), raw


def read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row's place and values."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for raw in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", raw
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read as parquet ({reason}); copy it again") from error


def fewest(rows: list[Row], most: int, seed: int) -> list[Row]:
    """At most `most` rows of each domain (0: all), whichever a hash puts first; order is kept."""
    if not most:
        return rows
    kept: set[str] = set()
    by_domain: dict[str, list[Row]] = {}
    for row in rows:
        by_domain.setdefault(row.domain, []).append(row)
    for members in by_domain.values():
        kept |= {row.id for row in sorted(members, key=lambda r: fraction(seed, r.id))[:most]}
    return [row for row in rows if row.id in kept]


def as_columns(rows: list[Row]) -> Mapping[str, list[Any]]:
    """Rows as `datasets` takes them."""
    return {name: [getattr(row, name) for row in rows] for name in COLUMNS}
