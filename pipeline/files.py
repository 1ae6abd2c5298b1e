"""Files that several processes may touch: atomic JSON, locks, and the folder kept between runs."""

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold `path` against other processes; the system lets go of it when this process dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, NotADirectoryError, FileExistsError) as error:
        raise ValueError(
            f"{path.parent} cannot be made ({error.strerror}); choose another"
        ) from error
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info(
                "another process is building %s; waiting for it", str(path).removesuffix(".lock")
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where models and digests are kept between runs: OUTRIDER_CACHE, or in the user's cache."""
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "outrider"
