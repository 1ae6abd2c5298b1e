"""What an export folder says of itself: decoder.json, read and checked; and its router, opened."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.digests import model_identity
from pipeline.models import EncoderConfig, TargetConfig
from router.checkpoint import LearnedRouter, load_router, read_config
from router.encoder import Encoder, SentenceEncoder

DECODER = "decoder.json"
SCHEMA_VERSION = 1
UNCHOSEN = {"backend": "transformers", "exactness": "law", "device": "cpu"}  # where none is named
KEYS = ("target", "drafters", "policy", "router", "encoder", "costs")


def read_export(folder: Path) -> dict[str, Any]:
    """The content of decoder.json, of a version understood here; all folders it names exist."""
    path = folder / DECODER
    if not path.is_file():
        raise ValueError(f"{folder} is not an export: it has no {DECODER}; run stage=export first")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); run stage=export again") from error
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        found = content.get("schema_version") if isinstance(content, dict) else None
        raise ValueError(
            f"{path} has schema_version={found}, this version reads {SCHEMA_VERSION}; "
            "run stage=export again"
        )
    if missing := [key for key in KEYS if key not in content]:
        raise ValueError(f"{path} lacks the key {missing[0]}; run stage=export again")
    parts = [entry["folder"] for entry in content["drafters"].values()]
    for part in (*parts, content["router"], content["encoder"], content["costs"]):
        if part is not None and not (folder / part).exists():
            raise ValueError(f"{folder / part} is missing, which {DECODER} names; export again")
    return content


def describe_target(config: TargetConfig) -> dict[str, Any]:
    """How to find a target again, and digests that tell whether it is the same one."""
    facts = asdict(config)
    if Path(config.name_or_path).expanduser().is_dir():
        facts["name_or_path"] = str(Path(config.name_or_path).expanduser().resolve())
    return {**facts, "digest": model_identity(config.resolve())}


def find_target(described: Mapping[str, Any], given: str | Path | None = None) -> Path:
    """The local folder of an export's target: the one given, or found by its recorded name.

    Raises ValueError where weights or tokenizer are not those that the drafters were made for.
    """
    source = {**UNCHOSEN, **described}
    del source["digest"], source["device"]
    if given is not None:
        source |= {
            "name_or_path": str(given),
            "revision": None,
            "wheel": None,
            "wheel_sha256": None,
        }
    folder = TargetConfig(**source).resolve()
    found = model_identity(folder)
    for part in ("weights", "tokenizer"):
        if found[part] != described["digest"][part]:
            raise ValueError(
                f"{folder} is not the target of this export: its {part} differ from those of "
                f"{described['name_or_path']}; give the folder of that model as target"
            )
    return folder


def open_router(
    folder: Path,
    content: Mapping[str, Any],
    device: str = "cpu",
    make_encoder: Callable[[Path, str], Encoder] = SentenceEncoder,
) -> LearnedRouter | None:
    """The export's router with its encoder, copied beside it or found by name; None without one."""
    if content["router"] is None:
        return None
    if content["encoder"] is not None:
        encoder_folder = folder / content["encoder"]
    else:
        facts = read_config(folder / content["router"])["encoder"]
        names = ("name_or_path", "revision", "wheel", "wheel_sha256")
        encoder_folder = EncoderConfig(**{name: facts.get(name) for name in names}).resolve()
    encoder = make_encoder(encoder_folder, device)
    return load_router(folder / content["router"], encoder, list(content["drafters"]))
