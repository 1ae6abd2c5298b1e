"""The main job: everything through evaluate and export, then the table and what to deploy."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.learning import lineage
from pipeline.manifest import age, read_manifest
from pipeline.progress import duration
from pipeline.report import as_text, findings
from pipeline.stage import Need, Stage, Workspace

SUMMARY = "summary.txt"


@dataclass(frozen=True, kw_only=True)
class All(Stage):
    """Needs the two ends of the pipeline, and shows what they found."""

    summary: ClassVar[str] = "everything: data to export, then one table and what to deploy here"
    repeats: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        return {"evaluate": Need("evaluate"), "export": Need("export")}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        evaluate, export = workspace.inputs["evaluate"], workspace.inputs["export"]
        folders = dict.fromkeys([*lineage(evaluate), *lineage(export)])
        seconds = {folder: read_manifest(folder)["seconds"] for folder in folders}
        lines = [f"{len(seconds)} artifacts, {duration(sum(seconds.values()))} of work in all:"]
        for folder, spent in seconds.items():
            when = f"{duration(age(folder))} ago"
            lines.append(f"  {folder.parent.name:<13}{duration(spent):>12}  {when:>16}  {folder}")
        lines.append(f"report: {evaluate / 'report.html'}")
        lines.append(f"export: {export} (load_decoder in a new process decodes with it)")
        results = json.loads((evaluate / "results.json").read_text(encoding="utf-8"))
        text = "\n".join([*lines, "", as_text(findings(results))]) + "\n"
        (workspace.out / SUMMARY).write_text(text, encoding="utf-8")
        sys.stdout.write(text)
        return {"artifacts": len(seconds), "seconds_of_work": round(sum(seconds.values()), 3)}
