"""The menu and a typing error come at once: what takes a second to import waits until it is used.

Would catch: an import at the top of a module that every stage's class comes with; a model's library
that is loaded to tell what "auto" stands for; threads that spin for long because OpenMP was loaded
before it was told not to, or against a person's own choice.
"""

import os
import subprocess
import sys

import pytest
from test_target_choice import KNOWN, config

HEAVY = ("transformers", "accelerate", "pandas", "datasets", "matplotlib", "wandb", "peft")
PROGRAM = """
import sys
from pipeline.__main__ import main
code = main(sys.argv[2:])
held = [name for name in sys.argv[1].split(",") if name in sys.modules]
sys.exit(f"imported {held}" if held else code)
"""


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 0), (["stage=prepar"], 2), (["target=local"], 0)]
)
def test_nothing_heavy_is_imported_to_answer_at_once(tmp_path, monkeypatch, arguments, code):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "target=local" in arguments:  # a model that is there
        folder = config(tmp_path / "model", KNOWN).resolve()
        arguments = [*arguments, f"target.name_or_path={folder}"]
    command = [sys.executable, "-c", PROGRAM, ",".join(HEAVY), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("missing" in done.stdout) == (code == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings another OpenMP elsewhere")
@pytest.mark.parametrize("chosen", [None, "77"])
def test_threads_sleep_soon_unless_somebody_chose_otherwise(tmp_path, chosen):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | ({"GOMP_SPINCOUNT": chosen} if chosen else {})
    program = [sys.executable, "-c", "import pipeline.__main__, torch"]
    done = subprocess.run(
        program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert f"GOMP_SPINCOUNT = '{chosen or 3000}'" in done.stderr
