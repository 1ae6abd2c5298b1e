"""Sentence embeddings of prompts; the only home of sentence-transformers."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

# What decides an embedding: weights, tokenizer, and how token vectors are pooled and cut.
IDENTITY_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
)


@runtime_checkable
class Encoder(Protocol):
    """Turns texts into vectors; `digest` names the weights, so that none are mixed up."""

    @property
    def digest(self) -> str:
        """Identity of the weights."""

    def encode(self, texts: Sequence[str]) -> Tensor:  # [N, E] float32 on the CPU
        """One vector a text."""


def encoder_digest(folder: Path) -> str:
    """Hex digest of the files of a sentence-transformers folder that decide its embeddings."""
    files = [folder / name for name in IDENTITY_FILES if (folder / name).exists()]
    for pattern in ("*.safetensors", "[0-9]*_*/*.safetensors", "[0-9]*_*/config.json"):
        files += sorted(folder.glob(pattern))
    if not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(
            f"{folder} holds no model.safetensors; point encoder.name_or_path at a "
            "sentence-transformers folder saved as safetensors"
        )
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(folder)).encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


class SentenceEncoder:
    """A sentence-transformers model read from a local folder; loaded at the first text.

    Texts beyond its window (256 tokens for all-MiniLM-L6-v2) are cut at the end, as the model does.
    """

    def __init__(self, folder: Path, device: str = "cpu", batch_size: int = 32) -> None:
        self.folder = folder
        self.device = device
        self.batch_size = batch_size

    @cached_property
    def digest(self) -> str:
        return encoder_digest(self.folder)

    @cached_property
    def _model(self):  # type: ignore[no-untyped-def]  # the library has no home elsewhere
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(self.folder), device=self.device, local_files_only=True)

    def encode(self, texts: Sequence[str]) -> Tensor:  # [N, E] float32 on the CPU
        """One vector a text; equal texts have equal vectors up to float rounding."""
        vectors = self._model.encode(
            list(texts),
            batch_size=self.batch_size,
            convert_to_tensor=True,
            show_progress_bar=False,
        )
        return vectors.float().cpu()
