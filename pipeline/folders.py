"""Model folders that may be loaded: complete, and in a format that cannot run code."""

import json
from pathlib import Path
from typing import Any


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds no complete safetensors model; nothing is ever unpickled."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; give a folder in the Hugging Face layout")
    _read_json(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(_read_json(index).get("weight_map", {}).values())
        if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
            raise ValueError(
                f"{folder} lacks {missing[0]}, which its index names; download it again"
            )
    elif not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has no .safetensors file, and nothing else is loaded because other "
            "formats can run code; save the model again with save_pretrained()"
        )
    for shard in folder.glob("*.safetensors"):
        _check_whole(shard)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); download or save it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (it holds no object); download or save it again")
    return content


def _check_whole(shard: Path) -> None:
    """Refuse a safetensors file that is shorter or longer than its own header says."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(header_bytes)) if 2 <= header_bytes <= size - 8 else {}
            ends = [
                tensor["data_offsets"][1] for name, tensor in header.items() if name[:2] != "__"
            ]
        except (ValueError, KeyError, TypeError):
            ends = []
    expected = 8 + header_bytes + max(ends, default=-1)
    if not ends or size != expected:
        raise ValueError(
            f"{shard} is damaged or cut short ({size} bytes); download or save it again"
        )
