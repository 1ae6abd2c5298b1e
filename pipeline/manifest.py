"""The manifest: written last and atomically, so that present means finished."""

import hashlib
import importlib.metadata
import json
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.digests import digest, sha256
from pipeline.files import sweep, write_json
from pipeline.runtime import hardware

MANIFEST = "manifest.json"
PACKAGES = (
    "outrider",
    "torch",
    "transformers",
    "triton",
    "accelerate",
    "datasets",
    "safetensors",
    "numpy",
)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished artifact; raises ValueError where the file is not one."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["identity"]["stage"], content["files"], content["metrics"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; delete {folder} and run the stage again") from error
    return content


def age(folder: Path) -> float:
    """Seconds since an artifact was finished."""
    manifest = read_manifest(folder)
    return max(0.0, time.time() - manifest["started"] - manifest["seconds"])


def check_files(folder: Path) -> None:
    """Raise ValueError unless every file of a finished artifact is as it was written.

    A file is read again only where its size or times changed since its digest was last taken.
    """
    manifest = read_manifest(folder)
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            wrong = "is missing"
        elif path.stat().st_size != facts["bytes"]:
            wrong = f"has {path.stat().st_size} bytes instead of {facts['bytes']}"
        elif digest(path) != facts["sha256"]:
            wrong = "is not what was written (its SHA-256 differs)"
        else:
            continue
        stage = manifest["identity"]["stage"]
        raise ValueError(f"{path} {wrong}; delete {folder} and run stage={stage} again")


def finish(out: Path, identity: dict[str, Any], metrics: dict[str, Any], started: float) -> None:
    """Write the manifest: from now on the folder is finished."""
    sweep(out)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    write_json(
        out / MANIFEST,
        {
            "identity": identity,
            "metrics": metrics,
            "started": started,
            "seconds": time.time() - started,
            "files": {
                str(p.relative_to(out)): {"bytes": p.stat().st_size, "sha256": sha256(p)}
                for p in files
            },
            "command": ["python", "-m", "pipeline", *sys.argv[1:]],
            **circumstances(),
        },
    )


def circumstances() -> dict[str, Any]:
    """Machine, packages and code of this process, which every figure is told with."""
    return {"hardware": hardware(), "packages": package_versions(), **git_state()}


@cache
def package_versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


@cache
def git_state() -> dict[str, str | None]:
    """Commit of the code and a digest of what differs from it; None where git does not answer."""

    def git(*words: str) -> bytes | None:
        root = Path(__file__).parent.parent
        try:
            done = subprocess.run(["git", *words], cwd=root, capture_output=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout if done.returncode == 0 else None

    commit, diff = git("rev-parse", "HEAD"), git("diff", "HEAD")
    return {
        "commit": commit.decode().strip() if commit else None,
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
    }
