"""The bugs that this field is known for, each planted in the real source: the suite must fail for
each.

A test that cannot fail proves nothing. Every mutant is one textual edit, which must fit exactly
once, in a copy of the rooms; the tests named beside it run there in a process of their own and must
end in a failed assertion, not in an error of import. The untouched copy must pass all of them.
Sources: biased "lossless" samplers as published and repaired (noise used twice, a law reported that
was not drawn from, bfloat16 laws and numbers), and the bandits whose rewards dropped rejections.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("decode", "kernels", "drafters", "conf")
LAW = ("tests/decode/test_lossless.py", "by_chance and (plain or penalty) and 0.99999")
LM = ("tests/decode/test_lossless.py", "real_language_model and plain")
NOISE = ("tests/decode/test_noise.py", "finely")
BELIEF = ("tests/decode/test_policies.py", "censored_geometric or rejection_after")
HEARS = ("tests/decode/test_loop.py", "hears_of_every_step")


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str
    new: str
    caught_by: tuple[str, str]  # file, -k expression


MUTANTS = {
    "residual forgotten": Mutant(
        "kernels/reference.py",
        "residual = (target - draft).clamp_(min=0)",
        "residual = target.clone()",
        LAW,
    ),
    "the last draw repeats an acceptance number": Mutant(
        "decode/verification.py", "0.0), d.chance[0]]", "0.0), d.chance[-1]]", LAW
    ),
    "every draft is drawn with the same number": Mutant(
        "decode/sampling.py", "self._uniform(len(self.drawn))", "self._uniform(0)", LAW
    ),
    "verification repeats the drafter's numbers": Mutant(
        "decode/loop.py", '"verify", count', '"draft", count', LAW
    ),
    "drafter's law rounded to bfloat16": Mutant(
        "decode/sampling.py", "row = logits.detach()", "row = logits.bfloat16()", LAW
    ),
    "bonus from the wrong row": Mutant(
        "kernels/reference.py",
        "target = self._law(self.inputs.target_logits, rows, position)",
        "early = int(position > 0 and not drafted.any())\n"
        "            target = self._law(self.inputs.target_logits, rows, position - early)",
        LAW,
    ),
    "penalty misses the last token": Mutant(
        "decode/loop.py", "count_more(row.counts, kept)", "count_more(row.counts, kept[:-1])", LAW
    ),
    "penalty misses the draft before it": Mutant(
        "decode/sampling.py", "self._seen[token_id] = True", "self._seen[token_id] |= False", LAW
    ),
    "numbers rounded to bfloat16": Mutant(
        "decode/verification.py",
        "torch.tensor(uniforms, dtype=torch.float64, device=device)",
        "torch.tensor(uniforms, device=device).bfloat16().clamp(max=0.996).double()",
        LAW,
    ),
    "noise of eight bits": Mutant(
        "kernels/race.py",
        "return (words >> np.uint64(11)) * TO_UNIT",
        "return np.floor((words >> np.uint64(11)) * TO_UNIT * 256) / 256",
        NOISE,
    ),
    "a race that forgets the place": Mutant(
        "kernels/coupled_reference.py",
        "places[b] + i",
        "places[b]",
        ("tests/decode/test_coupling.py", "whatever_is_drafted"),
    ),
    "drafter misreports its law": Mutant(
        "drafters/lm_session.py", "torch.stack(rows) if", "torch.stack(rows) * 0.7 if", LM
    ),
    "a rejected draft stays in the cache": Mutant(
        "decode/loop.py",
        "rollback(row.target, len(row.token_ids) - 1)",
        "rollback(row.target, min(len(row.token_ids), row.target.length))",
        ("tests/decode/test_loop.py", "greedy_text"),
    ),
    "belief drops rejections": Mutant(
        "decode/policies/belief.py",
        "table.rejected if accepted < seen else table.accepted",
        "table.accepted",
        BELIEF,
    ),
    "policy hears of accepted drafts only": Mutant(
        "decode/loop.py",
        "if row.policy is not None:\n                row.policy.learn",
        "if row.policy is not None and accepted[b]:\n                row.policy.learn",
        HEARS,
    ),
}


def run_tests(folder: Path, *selections: tuple[str, str]) -> subprocess.CompletedProcess[str]:
    """Run tests against the copy of the rooms in `folder`."""
    files = list(dict.fromkeys(file for file, _ in selections))
    words = " or ".join(f"({words})" for _, words in selections)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-k", words]
    return run([sys.executable, "-m", "pytest", *options, *files], folder)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The rooms and their tests, to be changed."""
    for name in (*ROOMS, "tests/decode"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests/conftest.py", "tests/fakes.py", "tests/enumeration.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_untouched_copy_passes_and_is_what_runs(copy: Path) -> None:
    selections = dict.fromkeys(mutant.caught_by for mutant in MUTANTS.values())
    done = run_tests(copy, *selections)
    assert done.returncode == 0, done.stdout + done.stderr
    where = "import importlib.util as u; print([u.find_spec(room).origin for room in {}])"
    found = run([sys.executable, "-c", where.format(ROOMS)], copy)
    assert found.stdout.count(str(copy)) == len(ROOMS), found.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_fails_for_a_planted_bug(name: str, copy: Path) -> None:
    mutant = MUTANTS[name]
    path = copy / mutant.file
    source = path.read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.old!r} must stand once in {mutant.file}"
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    done = run_tests(copy, mutant.caught_by)
    assert done.returncode == 1, f"survived:\n{done.stdout}{done.stderr}"
    assert "assert" in done.stdout
    assert "error" not in done.stdout.splitlines()[-1], done.stdout
