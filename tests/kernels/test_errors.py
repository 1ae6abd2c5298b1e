"""Is every misuse one sentence that names the value, from both implementations alike?

Would catch: NaN that becomes a token; a wrong shape that broadcasts; bfloat16 uniforms; ids past
the vocabulary read out of bounds; a parameter out of range on the device, unseen by the host.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import make_case

from kernels.reference import verify as reference_verify
from kernels.verify import verify as triton_verify

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("verify", [reference_verify, triton_verify])
INF, NAN = float("inf"), float("nan")


def rejected(verify: Callable, **changes: Any) -> str:
    """The sentence with which a call of two rows, two drafts, eleven tokens is refused."""
    case = make_case(0, 2, 2, 11, device=DEVICE)
    arguments = {
        "target_logits": case.target_logits,
        "draft_token_ids": case.draft_token_ids,
        "draft_logits": case.draft_logits,
        **case.options,
        **changes,
    }
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the caller matches the sentence)
        verify(**arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@BOTH
@pytest.mark.parametrize(
    ("value", "says"), [(NAN, "NaN or +inf"), (INF, "NaN or +inf"), (-INF, "-inf for every token")]
)
@pytest.mark.parametrize("name", ["target_logits", "draft_logits"])
def test_rows_that_are_no_law(verify: Callable, value: float, says: str, name: str) -> None:
    logits = getattr(make_case(0, 2, 2, 11, device=DEVICE), name)
    if value == -INF:
        logits[1, 1] = value
    else:
        logits[1, 1, 4] = value
    sentence = rejected(verify, **{name: logits})
    assert f"{name} of batch row 1, position 1" in sentence
    assert says in sentence


@BOTH
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"uniforms": torch.zeros(2, 2)}, "uniforms has shape [2, 2]"),
        ({"uniforms": torch.zeros(2, 3, dtype=torch.bfloat16)}, "uniforms are torch.bfloat16"),
        ({"uniforms": torch.ones(2, 3)}, "uniforms of batch row 0, position 0 is 1.0"),
        ({"uniforms": torch.full((2, 3), NAN)}, "uniforms of batch row 0"),
        ({"draft_token_ids": torch.tensor([[1, 2], [3, 11]])}, "row 1, position 1 is 11"),
        ({"draft_token_ids": torch.tensor([[1, 2], [-2, 1]])}, "row 1, position 0 is -2"),
        ({"draft_token_ids": torch.zeros(2, 3).long()}, "draft_token_ids has shape [2, 3]"),
        ({"draft_token_ids": torch.zeros(2, 2)}, "draft_token_ids is torch.float32"),
        ({"draft_logits": torch.zeros(2, 2, 12)}, "draft_logits has shape [2, 2, 12]"),
        ({"draft_logits": torch.zeros(2, 2, 11).long()}, "draft_logits is torch.int64"),
        ({"target_logits": torch.zeros(3, 11)}, "target_logits is torch.float32 of shape [3, 11]"),
        ({"num_draft_tokens": torch.tensor([0, 3])}, "num_draft_tokens of batch row 1 is 3"),
        ({"temperature": torch.tensor([1.0, -1.0])}, "temperature=-1.0 of batch row 1"),
        ({"top_k": torch.tensor([-1, 0])}, "top_k=-1 of batch row 0"),
        ({"top_p": torch.tensor([1.0, 0.0])}, "top_p=0.0 of batch row 1"),
        ({"min_p": torch.tensor([1.5, 0.0])}, "min_p=1.5 of batch row 0"),
        ({"repetition_penalty": torch.tensor([1.0, NAN])}, "repetition_penalty=nan of batch row 1"),
        ({"draft_is_one_hot": torch.tensor([1, 0])}, "draft_is_one_hot is torch.int64"),
    ],
)
def test_arguments_that_do_not_fit(verify: Callable, changes: dict[str, Any], says: str) -> None:
    on_host = ("temperature", "num_draft_tokens", "top_k", "top_p", "min_p", "repetition_penalty")
    changes = {k: v if k in on_host else v.to(DEVICE) for k, v in changes.items()}
    assert says in rejected(verify, **changes)


@BOTH
def test_a_drafted_row_needs_its_logits(verify: Callable) -> None:
    flags = torch.tensor([True, False])
    sentence = rejected(verify, draft_logits=None, draft_is_one_hot=flags)
    assert "draft_is_one_hot of batch row 1 is False" in sentence


def test_the_kernel_names_the_types_it_reads() -> None:
    logits = make_case(0, 2, 2, 11, device=DEVICE).target_logits.double()
    assert "the kernel reads bfloat16" in rejected(triton_verify, target_logits=logits)
