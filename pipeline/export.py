"""Stage export: drafters and router as folders that stand alone, each read back and compared.

decoder.json, which `load_decoder` reads (paths are relative to the folder):

    {"schema_version": 1,
     "target": {"name_or_path", "revision", "wheel", "wheel_sha256", "dtype", "trust_remote_code",
                "backend", "exactness", "device",                        as evaluated, never "auto"
                "digest": {"weights", "config", "tokenizer", "chat_template", "code"}},
     "drafters": {name: {"kind": dotted config class, "config": {its fields},
                         "folder": "drafters/<name>/own" | null,         for kind.build(weights=...)
                         "pretrained": "drafters/<name>" | null,         a whole Hugging Face model
                         "adapter": "drafters/<name>/adapter" | null,    for PEFT, on its base's
                         "trained": bool}},                              in the order of the pool
     "policy": {"_target_": dotted config class, its fields},
     "router": "router" | null, "encoder": "encoder" | null,             null: found by its name
     "costs": "costs.json"}

The target's weights are not copied: `exported.find_target` finds and checks them.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from decode.targets.transformers import TransformersTarget
from drafters.base import BuildContext, target_parts
from pipeline import cards
from pipeline.build import build_drafters, drafter_needs, load_target
from pipeline.config import Pool
from pipeline.exported import DECODER, SCHEMA_VERSION, describe_target, open_router, read_export
from pipeline.files import write_json
from pipeline.models import TargetConfig, resolve_encoder
from pipeline.roundtrip import check_adapter, check_drafter, check_pretrained, check_routers
from pipeline.stage import Need, Stage, Workspace
from pipeline.train_router import read_examples
from router.checkpoint import CONFIG, WEIGHTS, load_router
from router.encoder import SentenceEncoder

log = logging.getLogger(__name__)

ENCODER_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model")  # and in its modules


@dataclass(frozen=True, kw_only=True)
class Export(Stage):
    """Writes the folder, reads everything back, and fails where one number differs."""

    reads: ClassVar[tuple[str, ...]] = ("target", "pool", "policy", "encoder")
    summary: ClassVar[str] = "drafters, router and costs as folders that stand alone, with cards"

    license: str | None
    pretrained: bool
    copy_encoder: bool

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        return {
            "router": Need("train_router"),
            "acceptance": Need("collect"),
            "costs": Need("profile"),
            **drafter_needs(groups["pool"]),
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        pool: Pool = workspace.groups["pool"]
        config: TargetConfig = workspace.groups["target"]
        target = load_target(config, workspace.runtime, whole=True)
        drafters = build_drafters(pool, target, workspace.inputs)
        content = self._describe(pool, config, workspace)
        differences: dict[str, float] = {}
        for name, entry in content["drafters"].items():
            if entry["trained"]:
                differences |= self._export_drafter(name, entry, drafters, target, workspace)
        differences |= export_adapters(content["drafters"], drafters, target, workspace.out)
        self._export_router(workspace)
        shutil.copyfile(workspace.inputs["costs"] / "costs.json", workspace.out / "costs.json")
        self._write_cards(content, pool, workspace)
        write_json(workspace.out / DECODER, content)
        trained = load_router(workspace.inputs["router"], self._encoder(workspace))
        exported = open_router(workspace.out, read_export(workspace.out), "cpu", SentenceEncoder)
        check_routers(trained, exported)
        return {"num_drafters": len(drafters), **differences}

    def _describe(self, pool: Pool, target: TargetConfig, workspace: Workspace) -> dict[str, Any]:
        """The content of decoder.json."""
        described = {}
        for name, entry in pool.entries.items():
            trained = entry.trained_by is not None
            described[name] = {
                "kind": _dotted(entry.drafter),
                "config": asdict(entry.drafter),
                "folder": f"drafters/{name}/own" if trained else None,
                "pretrained": f"drafters/{name}" if trained and self.pretrained else None,
                "adapter": None,
                "trained": trained,
            }
        policy = workspace.groups["policy"]
        return {
            "schema_version": SCHEMA_VERSION,
            "target": {**describe_target(target), "device": workspace.runtime.resolved_device()},
            "drafters": described,
            "policy": {"_target_": _dotted(policy), **asdict(policy)},
            "router": "router",
            "encoder": "encoder" if self.copy_encoder else None,
            "costs": "costs.json",
        }

    def _export_drafter(
        self,
        name: str,
        entry: dict[str, Any],
        drafters: Mapping[str, Any],
        target: TransformersTarget,
        workspace: Workspace,
    ) -> dict[str, float]:
        """Write one trained drafter in both layouts; how far each is from the original."""
        drafter = drafters[name]
        own = workspace.out / entry["folder"]
        drafter.save(own)
        config = workspace.groups["pool"].entries[name].drafter
        parts = {part: drafters[part] for part in config.part_names}
        again = config.build(BuildContext(target_parts(target), own, parts))
        differences = {f"{name}_own": check_drafter(name, drafter, again, target)}
        if entry["pretrained"] is None:
            return differences
        if not hasattr(drafter, "export_pretrained"):
            log.warning("%s has no Hugging Face layout; exporting its own tensors only", name)
            entry["pretrained"] = None
            return differences
        whole = workspace.out / entry["pretrained"]
        drafter.export_pretrained(whole)
        differences[f"{name}_pretrained"] = check_pretrained(name, drafter, whole, target)
        return differences

    def _encoder(self, workspace: Workspace) -> SentenceEncoder:
        return SentenceEncoder(resolve_encoder(workspace.groups["encoder"]), "cpu")

    def _export_router(self, workspace: Workspace) -> None:
        folder = workspace.out / "router"
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(workspace.inputs["router"] / name, folder / name)
        if self.copy_encoder:
            copy_encoder(resolve_encoder(workspace.groups["encoder"]), workspace.out / "encoder")

    def _write_cards(self, content: dict[str, Any], pool: Pool, workspace: Workspace) -> None:
        target, out = content["target"], workspace.out
        license_name = self.license or target_license(workspace.groups["target"].resolve())
        examples = read_examples(workspace.inputs["acceptance"]).split("test")
        rows = acceptance_rows(examples)
        num_prompts = len(set(examples.prompt_ids))
        for name, entry in content["drafters"].items():
            if entry["trained"]:
                text = cards.drafter_card(
                    name,
                    entry,
                    target,
                    license_name,
                    workspace.manifest(f"drafter:{name}"),
                    pool.entries[name].domains,
                    cards.acceptance_table([r for r in rows if r[0] == name], "test", num_prompts),
                )
                _write(out / "drafters" / name / "README.md", text)
        router = workspace.inputs["router"]
        report, config = (json.loads((router / f).read_text()) for f in ("metrics.json", CONFIG))
        text = cards.router_card(report, config, target, license_name, workspace.manifest("router"))
        _write(out / "router" / "README.md", text)
        whole = cards.acceptance_table(rows, "test", num_prompts)
        _write(out / "README.md", cards.export_card(content, license_name, whole))


def export_adapters(
    described: Mapping[str, dict[str, Any]],
    drafters: Mapping[str, Any],
    target: TransformersTarget,
    out: Path,
) -> dict[str, float]:
    """Write adapters that PEFT puts on their bases, which stand in the export by now as whole
    models; how far each pair is from the original.
    """
    differences = {}
    for name, entry in described.items():
        if entry["pretrained"] is None or not hasattr(drafters[name], "export_adapter"):
            continue
        base = entry["config"]["base"]
        if described[base]["pretrained"] is None:
            log.warning("%s is exported merged only: its base %s is not exported", name, base)
            continue
        entry["adapter"] = f"{entry['pretrained']}/adapter"
        folder = out / entry["adapter"]
        drafters[name].export_adapter(folder, base=f"../../{base}")
        differences[f"{name}_adapter"] = check_adapter(
            name, drafters[name], folder, out / described[base]["pretrained"], target
        )
    return differences


def copy_encoder(source: Path, folder: Path) -> None:
    """The files that sentence-transformers needs, and no others."""
    patterns = [f"{where}{name}" for name in ENCODER_FILES for where in ("", "[0-9]*_*/")]
    for file in sorted({file for pattern in patterns for file in source.glob(pattern)}):
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def target_license(folder: Path) -> str:
    """The license that the target's card names; "other" where it has none."""
    card = folder / "README.md"
    if card.is_file():
        for line in card.read_text(encoding="utf-8").split("\n---")[0].splitlines():
            if line.startswith("license:"):
                return line.removeprefix("license:").strip().strip("'\"")
    return "other"


def acceptance_rows(examples: Any) -> list[list[Any]]:
    """acceptance_rate of every drafter, temperature and domain: sums, never means of means."""
    rows = []
    for n, drafter in enumerate(examples.drafters):
        for temperature in sorted(set(examples.temperatures.tolist())):
            for domain in sorted(set(examples.domains)):
                mask = (examples.temperatures == temperature).numpy() & (examples.domains == domain)
                trials = float(examples.trials[mask, n].sum())
                if trials > 0:
                    rate = float(examples.successes[mask, n].sum()) / trials
                    rows.append([drafter, temperature, domain, rate, round(trials)])
    return rows


def _dotted(config: Any) -> str:
    return f"{type(config).__module__}.{type(config).__qualname__}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
