"""What goes wrong in people's files, through the real command line: one sentence, nothing torn.

Would catch: a traceback; a sentence without the file or key, or without the next step; several
lines of a library's message; exit code 0; a folder with a manifest that was not finished; what a
failed stage had begun to write; a damaged or foreign file that is read as if it were whole.

Typing errors (keys, types, stages, groups) are in test_cli.py. Here the files are real: a tiny main
job is done once, and each case damages a copy of it or gives it something that does not fit.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, tiny_overrides, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline import __main__ as cli
from pipeline.__main__ import main
from pipeline.manifest import MANIFEST

Change = Callable[[Path], object]


class World:
    """A finished main job, and the command line for more of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.done = folder, folder / "done"
        self.target, self.encoder = folder / "tiny" / "target", folder / "tiny" / "encoder"
        fixed = ("tracking=disabled", "runtime.threads=1", "runtime.clock=virtual")
        self.overrides = [*tiny_overrides(folder / "tiny"), *fixed]
        assert main([*self.overrides, "stage=all", f"root={self.done}"]) == 0

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.done, folder))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("failures")
    with pytest.MonkeyPatch.context() as patch:
        alone(patch, folder / "cache")
        return World(folder)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone(monkeypatch, tmp_path / "cache")


def alone(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """A cache of its own, no Hub, pytest's logging, no bars of transformers between the lines."""
    from transformers.utils import logging

    patch.setenv("OUTRIDER_CACHE", str(cache))
    logging.disable_progress_bar()
    patch.delenv("HYDRA_FULL_ERROR", raising=False)
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    patch.setattr(cli, "set_up_logging", lambda debug: None)


@pytest.fixture
def fails(world: World, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must fail; gives its one sentence."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        code = main([*world.overrides, *arguments])
        err = capsys.readouterr().err
        assert code == 1, err
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        return err.rstrip()

    return run


def unfinished(root: Path) -> list[Path]:
    """What lies in artifact folders that have no manifest, and anything half-written."""
    folders = [path for path in root.glob("*/*/") if not (path / MANIFEST).exists()]
    return [*(file for folder in folders for file in folder.rglob("*")), *root.rglob("*.partial")]


def the(root: Path, pattern: str) -> Path:
    return sorted(root.glob(pattern))[0]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    """One bit: equal size, another digest."""
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


READS = {  # a file of a finished artifact -> a stage that reads it
    "regenerate/*/answers-00000.safetensors": "collect",
    "distill/*/model.safetensors": "collect",
    "collect/*/acceptance.parquet": "train_router",
    "profile/*/costs.json": "export",
    "train_router/*/model.safetensors": "export",
    "prepare/*/datasets/test/*.arrow": "regenerate",
    "export/*/drafters/generic/own/model.safetensors": "decode",
}


@pytest.mark.parametrize("damage", [cut, flip])
@pytest.mark.parametrize("pattern", READS)
def test_a_damaged_file_is_named_with_its_stage(world, fails, tmp_path, pattern, damage):
    root = world.copy(tmp_path / "root")
    path = the(root, pattern)
    damage(path)
    stage = READS[pattern]
    text = fails(f"stage={stage}", f"root={root}", "force=true", "stages.decode.prompt=w1")
    assert str(path) in text
    assert ("bytes instead of" if damage is cut else "its SHA-256 differs") in text
    assert f"and run stage={pattern.partition('/')[0]} again" in text
    assert unfinished(root) == []


@pytest.mark.parametrize("content", ["", "{", '{"identity": {}}', "[]"])
def test_a_damaged_manifest_is_named(world, fails, tmp_path, content):
    root = world.copy(tmp_path / "root")
    path = the(root, f"collect/*/{MANIFEST}")
    path.write_text(content)
    text = fails("stage=train_router", f"root={root}", "force=true")
    assert text.startswith(f"{path} is damaged; delete {path.parent}")


def test_a_truncated_shard_of_an_unfinished_stage_is_named(world, fails, tmp_path):
    root = world.copy(tmp_path / "root")
    (the(root, "regenerate/*/") / MANIFEST).unlink()
    path = the(root, "regenerate/*/answers-00001.safetensors")
    cut(path)
    text = fails("stage=regenerate", f"root={root}")
    assert text.startswith(f"{path} is damaged")
    assert "run stage=regenerate force=true" in text
    assert not (path.parent / MANIFEST).exists()


ROWS = {
    b'{"prompt": "w1"}\n{"response": "x"}': "line 2 has no prompt (it has response); add it",
    b'{"prompt": " \\t"}': "line 1 has an empty prompt; fill it or delete the row",
    b'{"prompt": "w1"}\n\xff\xfe{': "line 2, is not valid UTF-8 (byte 0); save the file as UTF-8",
    b'{"prompt": "w1"': "line 1, is not JSON (",
    b"": "the data holds no prompt; give a file",
}


@pytest.mark.parametrize("content", ROWS)
def test_a_row_that_cannot_be_read_is_named(fails, tmp_path, content):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    text = fails("stage=prepare", f"root={tmp_path / 'root'}", f"data.train={path}")
    assert ROWS[content] in text
    assert str(path) in text or not content
    assert unfinished(tmp_path / "root") == []


def test_prompts_longer_than_the_context_are_refused(world, fails, tmp_path):
    path = tmp_path / "long.jsonl"
    rows = [{"prompt": f"w{number} " * 150, "family": f"f{number}"} for number in range(24)]
    path.write_text("\n".join(map(json.dumps, rows)))
    text = fails(
        "stage=regenerate", "build_missing=true", f"root={tmp_path / 'r'}", f"data.train={path}"
    )
    assert "the target's context of 128" in text
    assert unfinished(tmp_path / "r") == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "prompt 1 is empty; give some text"),
        (" ", "prompt 1 is empty; give some text"),
        ("w1 " * 200, "prompt 0 has 203 tokens, but the context holds 128; cut it to 127"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused(world, fails, tmp_path, prompt, words):
    root = world.copy(tmp_path / "root")
    text = fails("stage=decode", f"root={root}", f'stages.decode.prompt="{prompt}"')
    assert words in text
    assert not list(root.glob("decode/*/*"))


def without(name: str) -> Change:
    return lambda folder: [path.unlink() for path in folder.glob(name)]


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def rewrite(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def smaller(folder: Path) -> None:
    """Another model beside the target's tokenizer: 61 ids for its 97."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


UP = "model.layers.1.mlp.up_proj.weight"
WRONG_TARGETS: dict[str, tuple[Change, str]] = {
    "pickled": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "has no .safetensors file, and nothing else is loaded",
    ),
    "cut short": (lambda f: cut(f / "model.safetensors"), "model.safetensors is damaged or cut"),
    "config": (lambda f: (f / "config.json").write_text("{"), "config.json is damaged ("),
    "no tokenizer": (without("token*"), "no tokenizer could be loaded from"),
    "tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        "no tokenizer could be loaded from",
    ),
    "template": (
        lambda f: (f / "chat_template.jinja").write_text("{% for x in %}"),
        "chat template does not take these messages",
    ),
    "kind": (
        lambda f: (f / "config.json").write_text('{"model_type": "nope"}'),
        "no causal LM could be loaded from",
    ),
    "missing tensor": (tensors(lambda t: t.pop(UP)), f"lacks the tensor {UP}, which would be"),
    "wrong shape": (
        tensors(lambda t: t.update({UP: torch.ones(3, 3)})),
        "no causal LM could be loaded from",
    ),
    "nan": (
        tensors(lambda t: t["model.norm.weight"].fill_(torch.nan)),
        "the target's logits are not finite while answering",
    ),
    "vocabulary": (smaller, "but the target knows 61: its tokenizer is another model's"),
}


@pytest.mark.parametrize("name", WRONG_TARGETS)
def test_a_target_that_is_not_whole_is_refused(world, fails, tmp_path, name):
    folder = Path(shutil.copytree(world.target, tmp_path / "model"))
    change, words = WRONG_TARGETS[name]
    change(folder)
    root = tmp_path / "root"
    text = fails(
        "stage=regenerate", "build_missing=true", f"root={root}", f"target.name_or_path={folder}"
    )
    assert words in text
    assert ";" in text
    assert str(folder) in text or name in ("nan", "vocabulary", "template")
    assert not list(root.glob("regenerate/*/*"))
    assert unfinished(root) == []


def test_logits_that_are_no_numbers_end_decoding(world, fails, tmp_path):
    folder = Path(shutil.copytree(world.target, tmp_path / "model"))
    WRONG_TARGETS["nan"][0](folder)
    given = (f"stages.decode.target={folder}", "stages.decode.drafter=ngram")
    text = fails("stage=decode", f"root={tmp_path / 'r'}", *given, "stages.decode.prompt=w1")
    assert "holds NaN or +inf; look for" in text


def swapped(folder: Path) -> None:
    """The same words under other ids."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]
    path.write_text(json.dumps(content))


WRONG_DRAFTERS: dict[str, tuple[Change, str]] = {
    "another tokenizer": (swapped, "has another tokenizer than the target (token 'w1'"),
    "another vocabulary": (smaller, f"has 61 logits, fewer than the {VOCAB_SIZE} tokens"),
    "no tokenizer": (without("token*"), "no tokenizer could be loaded from"),
    "missing tensor": (tensors(lambda t: t.pop(UP)), f"lacks the tensor {UP}, which would be"),
}


@pytest.mark.parametrize("name", WRONG_DRAFTERS)
def test_a_drafter_that_does_not_fit_is_refused(world, fails, tmp_path, name):
    folder = Path(shutil.copytree(world.target, tmp_path / "drafter"))
    change, words = WRONG_DRAFTERS[name]
    change(folder)
    given = (f"stages.decode.target={world.target}", f"stages.decode.drafter={folder}")
    text = fails("stage=decode", f"root={tmp_path / 'r'}", *given, "stages.decode.prompt=w1")
    assert words in text
    assert str(folder) in text
    assert ";" in text


def test_a_pool_entry_with_another_tokenizer_is_refused(world, fails, tmp_path):
    folder = Path(shutil.copytree(world.target, tmp_path / "drafter"))
    swapped(folder)
    root = world.copy(tmp_path / "root")
    whole = "layers:[],num_draft_vocab:0,train_head:false,dtype:float32"
    drafter = f"{{_target_:drafters.lm.LmConfig,source:{folder},{whole}}}"
    entry = f"{{drafter:{drafter},trained_by:null,domains:[],init_from:null}}"
    text = fails("stage=collect", f"root={root}", f"+pool.entries.other={entry}")
    assert f"{folder} has another tokenizer than the target" in text
    assert unfinished(root) == []


@pytest.mark.parametrize("where", ["missing", "cut", "foreign"])
def test_an_encoder_that_cannot_be_read_is_refused(world, fails, tmp_path, where):
    folder = tmp_path / "encoder"
    if where != "missing":
        shutil.copytree(world.encoder, folder)
        cut(folder / "model.safetensors")
    if where == "foreign":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    root = world.copy(tmp_path / "root")
    text = fails("stage=train_router", f"root={root}", f"encoder.name_or_path={folder}")
    assert str(folder) in text
    assert ";" in text
    assert unfinished(root) == []


def test_online_tracking_without_a_login_is_refused_before_any_work(fails, tmp_path, monkeypatch):
    monkeypatch.setattr("wandb.login", lambda **_: False)
    text = fails("stage=prepare", f"root={tmp_path / 'r'}", "tracking=online")
    assert "no W&B login was found; run `wandb login`, or use tracking=offline" in text
    assert not (tmp_path / "r").exists()


def no_space(*_: object, **__: object) -> None:
    """As the operating system says it; pyarrow's errors have no file name either."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_space_for_tensors(*_: object, **__: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")


WRITERS: dict[str, tuple[str, Callable[..., None]]] = {
    "prepare": ("datasets.DatasetDict.save_to_disk", no_space),
    "regenerate": ("pipeline.answers.save_file", no_space_for_tensors),
    "distill": ("pipeline.checkpoints.save_file", no_space_for_tensors),
    "collect": ("pyarrow.parquet.ParquetWriter.write_table", no_space),
    "profile": ("pathlib.Path.write_text", no_space),
    "train_router": ("pipeline.train_router.write_json", no_space),
    "evaluate": ("pipeline.wallclock.Journal.add", no_space),
    "export": ("pipeline.export.write_json", no_space),
}


@pytest.mark.parametrize("stage", WRITERS)
def test_a_full_disk_names_the_folder_and_leaves_nothing_torn(
    world, fails, tmp_path, monkeypatch, stage
):
    root = world.copy(tmp_path / "root")
    folder = the(root, f"{stage}/*/")
    shutil.rmtree(folder)
    with monkeypatch.context() as patch:
        patch.setattr(*WRITERS[stage])
        text = fails(f"stage={stage}", f"root={root}")
    assert text == (
        f"{folder} cannot be written: the disk is full; free some space and run the same "
        "command again"
    )
    assert not (folder / MANIFEST).exists()
    assert not list(root.rglob("*.partial"))
    assert main([*world.overrides, f"stage={stage}", f"root={root}"]) == 0
    assert (folder / MANIFEST).exists()


def test_a_disk_that_is_full_for_the_manifest_leaves_the_stage_unfinished(
    world, fails, tmp_path, monkeypatch
):
    root = world.copy(tmp_path / "root")
    folder = the(root, "collect/*/")
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.manifest.write_json", no_space)
        text = fails("stage=collect", "force=true", f"root={root}")
    assert text.startswith(f"{folder} cannot be written: the disk is full")
    assert not folder.exists()


SETTINGS = {
    ("train_router", "penalties=[]"): "stages.train_router.penalties is empty; give values",
    ("train_router", "num_resamples=0"): "num_resamples=0 must be at least 1",
    ("evaluate", "draft_lengths=[]"): "stages.evaluate.draft_lengths is empty; give the K",
    ("evaluate", "draft_lengths=[99]"): "num_draft_tokens=99 must lie between 0 and 16",
    ("profile", "widths=[]"): "profile.widths=[] must lie between 1 and 17",
    ("profile", "draft_lengths=[17]"): "profile.draft_lengths=[17] must name lengths between",
    ("profile", "context_tokens=5000"): "do not fit the target's context of 128; lower it",
    ("regenerate", "shard_rows=0"): "stages.regenerate.shard_rows=0 must be at least 1",
    ("distill", "num_draft_tokens=0"): "num_draft_tokens=0 must lie between 1 and 16",
    ("distill", "learning_rate=-1"): "learning_rate=-1.0 must be positive",
    ("distill", "learning_rate=1e30"): "diverged at step 2",
    ("collect", "splits=[nope]"): "no answers in the splits nope; add them",
}


@pytest.mark.parametrize(("stage", "setting"), SETTINGS, ids=" ".join)
def test_a_value_that_cannot_work_is_named(world, fails, tmp_path, stage, setting):
    root = world.copy(tmp_path / "root")
    before = set(root.glob(f"*/*/{MANIFEST}"))
    text = fails(f"stage={stage}", f"root={root}", f"stages.{stage}.{setting}")
    assert SETTINGS[stage, setting] in text
    assert set(root.glob(f"*/*/{MANIFEST}")) == before


def test_the_tiny_tokenizer_is_the_targets(world):
    """Otherwise the cases above would be refused for another reason."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(world.target).get_vocab()
    assert found == tiny_tokenizer().get_vocab()
