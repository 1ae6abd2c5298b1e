"""Bugs these tests would catch: an export that loads only where it was made; drafters that come
back untrained, in another order or without their parts; a policy or router that is left behind;
costs of another machine taken for this one's; a description that makes it import any class it
names; heavy imports behind `import pipeline`.
"""

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from test_export import copy, exported, world  # noqa: F401 (fixtures)

from decode import Sampling, SpeculativeDecoder
from decode.clock import VirtualClock
from decode.resolve import policy_config
from pipeline import load_decoder
from pipeline.build import build_drafters, load_target
from pipeline.load import exported_choice
from pipeline.runtime import Runtime

PROMPTS = [list(range(5, 30)) + list(range(5, 20)), [9, 60, 33]]
SAMPLED = Sampling(temperature=0.8, seed=3)
NEW_PROCESS = """
import sys
import pipeline
assert "torch" not in sys.modules, "import pipeline must be light"
from pipeline import load_decoder
from decode import Sampling
result = load_decoder(sys.argv[1]).generate({prompts}, 12, Sampling(temperature=0.8, seed=3))
sys.stdout.write(str(result.token_ids))
"""


def test_a_new_process_writes_the_same_text(world: dict[str, Any], copy: Path) -> None:  # noqa: F811
    target = load_target(
        world["groups"]["target"], Runtime(device="cpu", threads=1, clock="virtual")
    )
    drafters = build_drafters(world["groups"]["pool"], target, world["inputs"])
    policy = world["groups"]["policy"].build(None, list(drafters), 0)
    wanted = SpeculativeDecoder(target, drafters, policy).generate(PROMPTS, 12, SAMPLED)
    script = NEW_PROCESS.format(prompts=PROMPTS)
    done = subprocess.run(
        [sys.executable, "-c", script, str(copy)], capture_output=True, text=True, check=False
    )
    assert done.stdout == str(wanted.token_ids), done.stderr
    assert any(m.num_drafted for m in wanted.metrics)
    loaded = load_decoder(copy, clock=VirtualClock())
    assert list(loaded.drafters) == list(drafters)
    assert loaded.router is not None


def test_under_gumbel_coupling_the_text_depends_on_no_policy(copy: Path) -> None:  # noqa: F811
    texts = [
        load_decoder(copy, policy=policy, coupling="gumbel", clock=VirtualClock()).generate(
            PROMPTS, 24, SAMPLED
        )
        for policy in ("ucb1", "thompson")
    ]
    assert texts[0].token_ids == texts[1].token_ids
    drafted = [[record.num_drafted for record in row] for row in texts[0].records]
    assert drafted != [[record.num_drafted for record in row] for row in texts[1].records]
    with pytest.raises(ValueError, match="coupling=maximal"):
        load_decoder(copy, coupling="maximal")


def test_costs_of_another_machine_are_measured_again_and_it_is_said(
    copy: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    description = json.loads((copy / "decoder.json").read_text())
    config = policy_config("posterior")
    kind = f"{type(config).__module__}.{type(config).__name__}"
    description["policy"] = {"_target_": kind, **asdict(config)}
    (copy / "decoder.json").write_text(json.dumps(description))
    with caplog.at_level(logging.WARNING):
        decoder = load_decoder(copy)
    assert len([r for r in caplog.records if "measuring them here" in r.message]) == 1
    assert type(decoder.policy).__name__ == "PosteriorPolicy"
    assert len(decoder.generate(PROMPTS, 12).token_ids[0]) == 12


def test_the_backend_may_be_another_and_the_text_stays(copy: Path) -> None:  # noqa: F811
    wanted = load_decoder(copy, policy="off")
    native = load_decoder(copy, policy="off", backend="native")
    assert (wanted.target.backend, native.target.backend) == ("transformers", "native")
    texts = [made.generate(PROMPTS, 12).token_ids for made in (wanted, native)]
    assert texts[0] == texts[1]
    # What an export that names no backend was made with.
    description = json.loads((copy / "decoder.json").read_text())
    assert description["target"].pop("backend") == "transformers"
    assert description["target"].pop("exactness") == "law"
    (copy / "decoder.json").write_text(json.dumps(description))
    assert load_decoder(copy, policy="off").target.backend == "transformers"


def test_what_was_exported_is_opened_again(copy: Path) -> None:  # noqa: F811
    """As evaluate measured it; on another kind of device what is usual there."""
    description = json.loads((copy / "decoder.json").read_text())
    chosen = {"dtype": "bfloat16", "backend": "native", "exactness": "bitwise", "device": "cpu"}
    description["target"] |= chosen
    (copy / "decoder.json").write_text(json.dumps(description))
    target: Any = load_decoder(copy, policy="off", device="cpu").target
    assert (target.dtype, target.backend, target.exactness) == (torch.bfloat16, "native", "bitwise")
    other: Any = load_decoder(copy, policy="off", device="cpu", dtype=torch.float32).target
    assert (other.dtype, other.backend, other.exactness) == (torch.float32, "native", "bitwise")
    assert load_decoder(copy, policy="off", backend="transformers").target.backend == "transformers"
    assert exported_choice(chosen, "cpu") == ("native", "bitwise")
    assert exported_choice(chosen, "cuda:1") == ("auto", "auto")
    on_gpu = {**chosen, "device": "cuda"}
    assert exported_choice(on_gpu, "cuda:1") == ("native", "bitwise")
    assert exported_choice(on_gpu, "cpu") == ("auto", "auto")
    law = {"backend": "transformers", "exactness": "law", "device": "cpu"}
    assert exported_choice(law, "cuda") == exported_choice(law, "cpu") == ("transformers", "law")


def test_the_policy_may_be_another(copy: Path) -> None:  # noqa: F811
    assert load_decoder(copy, policy="off").policy is None


def test_only_classes_of_this_project_are_made(copy: Path) -> None:  # noqa: F811
    description = json.loads((copy / "decoder.json").read_text())
    description["policy"] = {"_target_": "subprocess.Popen", "args": "true"}
    (copy / "decoder.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"subprocess\.Popen is no drafter or policy"):
        load_decoder(copy)


def test_what_is_no_export_is_refused(copy: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="is not an export"):
        load_decoder(tmp_path)
    shutil.rmtree(copy / "drafters" / "cut" / "own")
    with pytest.raises(ValueError, match="is missing"):
        load_decoder(copy)
