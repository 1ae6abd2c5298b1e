"""Where answers come from: the prompts behind a folder of them, and the target that gave them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.chat import load_prompts
from pipeline.manifest import MANIFEST, read_manifest
from pipeline.models import TargetConfig

PARTS = {  # of a target's identity; its dtype may differ, and regenerate chooses its own
    "weights": "weights",
    "config": "config",
    "tokenizer": "tokenizer",
    "chat_template": "chat template",
    "code": "code",
}


class Prompts(Mapping[str, Mapping[str, Any]]):
    """The rows of prepare, of all splits, by id."""

    def __init__(self, folder: Path) -> None:
        self._splits = load_prompts(folder)
        self._places = {
            name: (split, place)
            for split, rows in self._splits.items()
            for place, name in enumerate(rows["id"])
        }

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        split, place = self._places[name]
        row: Mapping[str, Any] = self._splits[split][place]
        return row

    def __iter__(self) -> Any:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def prompts_behind(answers: Path) -> Prompts | None:
    """The prompts that a finished folder of answers was made from; None where they are not known.

    They are not where the folder stands alone, or is not finished yet.
    """
    if not (answers / MANIFEST).exists():
        return None
    made_from = read_manifest(answers)["identity"]["inputs"].get("prompts")
    if made_from is None or not (answers.parent.parent / made_from / MANIFEST).exists():
        return None
    return Prompts(answers.parent.parent / made_from)


def refuse_other_target(answers: Path, config: TargetConfig) -> None:
    """Raise ValueError where a finished folder of answers was written by another target."""
    if not (answers / MANIFEST).exists():
        return
    then = read_manifest(answers)["identity"]["groups"].get("target", {})
    now = config.identity()
    others = [name for part, name in PARTS.items() if then.get(part, now[part]) != now[part]]
    if others:
        raise ValueError(
            f"{answers} was written by another target than {config.name_or_path} (they differ in "
            f"{' and '.join(others)}); run stage=regenerate with this one"
        )
