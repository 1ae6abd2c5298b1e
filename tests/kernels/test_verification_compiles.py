"""Would catch: verification that only the interpreter accepts; kernels compiled anew for another
batch; logits that are not read 16 bytes at a time; a kernel that does not wait for
the one in front of it; the last program of a row told apart without an atomic.

The compiler needs no GPU: see translated.py.
"""

import json
from pathlib import Path

from translated import told_by

PROGRAM = r"""
import json, sys
import kernels.overlap
from kernels.coupled import enqueue as race
from kernels.inputs import Inputs
from kernels.launching import collected, compile_all
from kernels.verify import Uses, verify

kernels.overlap.capability = lambda device: (9, 0)
kernels.overlap.use("launch")
V, K = 20_000, 4
PLAIN = Uses(top_k=False, top_p=False, min_p=False, repetition_penalty=False)

def call(batch):
    return {
        "target_logits": torch.empty(batch, K + 1, V, dtype=torch.bfloat16),
        "draft_token_ids": torch.empty(batch, K, dtype=torch.int32),
        "num_draft_tokens": torch.empty(batch, dtype=torch.int32),
        "temperature": torch.empty(batch).fill_(0.5),
        "top_k": torch.ones(batch, dtype=torch.int32),
        "top_p": torch.empty(batch).fill_(0.5),
        "min_p": torch.empty(batch).fill_(0.5),
        "repetition_penalty": torch.empty(batch).fill_(2),
        "seen_token_counts": torch.empty(batch, V, dtype=torch.int32),
        "check": False,
    }

def drawn(batch):  # at a temperature alone
    given = {name: value for name, value in call(batch).items() if name != "check"}
    return given | dict.fromkeys(("top_k", "top_p", "min_p", "repetition_penalty"))

def launches(batch):
    drafter = {
        "draft_logits": torch.empty(batch, K, V, dtype=torch.bfloat16),
        "uniforms": torch.empty(batch, K + 1, dtype=torch.float64),
    }
    words = torch.empty(batch, 3, dtype=torch.int64)
    with collected() as found:
        verify(**call(batch), **drafter, uses=PLAIN)
        verify(**call(batch), **drafter)
        race(Inputs.of_target(**drawn(batch)), words)
    return found

few, more, cpu = launches(3), launches(64), torch.device("cpu")
numbers = [compile_all(few, cpu, 2), compile_all(few + more, cpu, 2)]
compiled = [one.kernel.warmup(*one.args, grid=one.grid, **one.options) for one in few]
assembly = {}
for one, kernel in zip(few, compiled):
    assembly.setdefault(one.kernel.__name__, kernel.asm["ptx"])
print(json.dumps({
    "numbers": numbers,
    "launches": [one.kernel.__name__ for one in few],
    "waits": sorted(k for k, text in assembly.items() if "griddepcontrol.wait" in text),
    "wide": sorted(k for k, text in assembly.items() if "ld.global.v4" in text),
    "atomic": sorted(k for k, text in assembly.items() if "atom" in text),
}))
"""

PLAIN = ["stats_kernel", "resolve_kernel"]
CUT = ["stats_kernel", "cut_kernel", "resolve_kernel"]
RACE = ["race_kernel", "finish_kernel"]


def test_verification_compiles_for_a_gpu_once_for_all_batches(tmp_path: Path) -> None:
    told = json.loads(told_by(PROGRAM, tmp_path))
    assert told["launches"] == [*PLAIN, *CUT, *RACE]
    assert told["numbers"] == [7, 7]
    assert told["atomic"] == ["resolve_kernel"]
    assert told["waits"] == sorted({*PLAIN, *CUT})
    assert {*CUT, "race_kernel"} <= set(told["wide"])
