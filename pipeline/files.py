"""Files that several processes may touch: atomic JSON, locks, and the folder kept between runs."""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
BEGUN = ("*.partial", ".tmp??????")  # ours, and what safetensors writes before it renames it


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


def sweep(folder: Path) -> None:
    """Remove what a run that failed or was killed had begun to write and not put in place."""
    for partial in [path for pattern in BEGUN for path in folder.rglob(pattern)]:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def out_of_space(error: BaseException) -> int | None:
    """The errno of a full disk or a used-up quota, where one of these is what went wrong."""
    if isinstance(error, OSError) and error.errno in FULL:
        return error.errno
    if isinstance(error, SafetensorError) and (
        found := re.search(r"\(os error (\d+)\)", str(error))
    ):
        return int(found[1]) if int(found[1]) in FULL else None
    return None


def cache_folder() -> Path:
    """Where models and digests are kept between runs: OUTRIDER_CACHE, or in the user's cache."""
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "outrider"
