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
from pipeline.models import may_fetch
from pipeline.rows import Row, RowFormat, fraction

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

    train: Any  # a path or a list of them; * and ? match names
    validation: Any
    test: Any

    def load(self, seed: int) -> dict[str, list[Row]]:
        return {
            name: fewest(rows, self.max_rows_per_domain if name == "train" else 0, seed)
            for name, paths in self.files().items()
            if (rows := [row for path in paths for row in self._read_file(path)])
        }

    def identity(self) -> dict[str, Any]:
        contents = {
            name: [(stem(path), digest(path)) for path in paths]
            for name, paths in self.files().items()
        }
        return {"kind": "files", "format": columns(self), "files": contents}

    def files(self) -> dict[str, list[Path]]:
        """The files of each split, sorted; raises ValueError for a path that is not there."""
        found = {
            name: expand(name, getattr(self, name)) for name in ("train", "validation", "test")
        }
        if not found["train"]:
            raise ValueError("data.train names no file; add data.train=PATH (.jsonl or .parquet)")
        return found

    def _read_file(self, path: Path) -> Iterator[Row]:
        read = read_parquet if path.name.endswith(PARQUET) else read_json_lines
        for where, raw in read(path):
            yield self.read(raw, where, domain=stem(path))


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
            rows = [
                self.read(raw, f"{self.name_or_path}, split {split}, row {number}", self._domain)
                for number, raw in enumerate(self._load_split(split), start=1)
            ]
            found[name] = fewest(rows, self.max_rows_per_domain if name == "train" else 0, seed)
        return found

    def identity(self) -> dict[str, Any]:
        splits = [self.train, self.validation, self.test]
        prints = {split: self._load_split(split)._fingerprint for split in splits if split}
        kind = {"kind": "hub", "name": self.name_or_path, "config": self.config}
        return {**kind, "format": columns(self), "revision": self.revision, "contents": prints}

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


def expand(name: str, value: Any) -> list[Path]:
    """The files that a path, a pattern or a list of them names."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"data.{name}={value} is no path; give one, or a list as in [a.jsonl,b.jsonl]"
        )
    found: list[Path] = []
    for text in texts:
        paths = sorted(Path(path) for path in glob.glob(str(Path(text).expanduser())))
        if not paths or not all(path.is_file() for path in paths):
            raise ValueError(
                f"data.{name}={text} is not a file; check the path (from here: {Path.cwd()})"
            )
        for path in paths:
            if not path.name.endswith(JSON_LINES + PARQUET):
                known = ", ".join(JSON_LINES + PARQUET)
                raise ValueError(
                    f"data.{name}={path} has a format that is not known; use one of {known}"
                )
        found += paths
    return found


def stem(path: Path) -> str:
    """A file's name without its endings: the domain of rows that name none."""
    return path.name.split(".")[0] or path.name


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
    return {name: [getattr(row, name) for row in rows] for name in Row.__dataclass_fields__}
