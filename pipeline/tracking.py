"""Publish finished artifacts to Weights & Biases: one run each, from manifest and curves.

Tracking never breaks a run: where W&B fails, it is said once and the artifact is as good as before.
"""

import json
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline import markup
from pipeline.history import read_history
from pipeline.manifest import read_manifest
from pipeline.stage import Artifact

log = logging.getLogger(__name__)

MODES = ("offline", "online", "disabled")
RESULTS = "results.json"


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Where runs are published; never part of an artifact's identity."""

    mode: str  # "offline": a folder that `wandb sync` uploads; "online"; "disabled"
    project: str
    entity: str | None  # the W&B team; None: the account's own

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"tracking.mode={self.mode} is not known; use {', '.join(MODES)}")

    def check_login(self) -> None:
        """Raise ValueError where runs should go online and nobody is logged in."""
        if self.mode != "online":
            return
        import wandb

        if not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "tracking=online, but no W&B login was found; run `wandb login`, "
                "or use tracking=offline"
            )


def publish(tracking: Tracking, artifact: Artifact, root: Path) -> None:
    """Send a finished artifact to W&B as `<stage>-<signature>`; a failure is one warning."""
    if tracking.mode == "disabled":
        return
    try:
        _publish(tracking, artifact, root)
    except Exception as error:  # whatever W&B raises: the artifact is finished, and the run goes on
        _say_failed(type(error).__name__, str(error).strip().partition("\n")[0])


@cache
def _say_failed(kind: str, reason: str) -> None:
    log.warning("W&B failed (%s: %s); artifacts are complete without it", kind, reason)


def _publish(tracking: Tracking, artifact: Artifact, root: Path) -> None:
    import wandb

    manifest = read_manifest(artifact.folder)
    run = wandb.init(
        mode=tracking.mode,  # type: ignore[arg-type]  # one of MODES
        project=tracking.project,
        entity=tracking.entity,
        id=f"{artifact.stage}-{artifact.signature}",
        name=f"{artifact.stage}-{artifact.signature}",
        job_type=artifact.stage,
        dir=str(root.resolve()),
        config=run_config(manifest),
        resume="allow" if tracking.mode == "online" else None,  # an offline run cannot be resumed
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
        ),
    )
    last = 0
    try:
        for last, values in read_history(artifact.folder):
            run.log(values, step=last)
        if media := _media(artifact.folder):
            run.log(media, step=last)
        run.summary.update({**manifest["metrics"], "seconds": manifest["seconds"]})
    finally:
        run.finish()


def run_config(manifest: dict[str, Any]) -> dict[str, Any]:
    """What W&B keeps as a run's config: the identity, and where it came from."""
    kept = ("command", "hardware", "packages", "commit", "diff_sha256")
    return {
        **manifest["identity"],
        "lineage": manifest["identity"]["inputs"],
        **{name: manifest[name] for name in kept if name in manifest},
    }


def _media(folder: Path) -> dict[str, Any]:
    """Plots, every table of results.json (a list of mappings), and samples as a page too."""
    import wandb

    media: dict[str, Any] = {
        path.stem: wandb.Image(str(path)) for path in sorted(folder.glob("*.png"))
    }
    results = folder / RESULTS
    content = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    for name, rows in content.items() if isinstance(content, dict) else ():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            columns = list(dict.fromkeys(key for row in rows for key in row))
            data = [[_cell(column, row.get(column)) for column in columns] for row in rows]
            media[f"{name}_table"] = wandb.Table(columns=columns, data=data)
    if isinstance(content, dict) and content.get("samples"):
        page = f"<style>{markup.SAMPLE_STYLE}</style>{markup.samples(content['samples'])}"
        media["samples"] = wandb.Html(page, inject=False)
    return media


def _cell(column: str, value: Any) -> Any:
    """A value that a table column can hold: containers become text, accepted spans in brackets."""
    if column == "spans" and value:
        return markup.bracketed(value)
    return json.dumps(value) if isinstance(value, list | dict) else value
