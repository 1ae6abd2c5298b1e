"""The arguments of `verify`, checked once for both implementations."""

from dataclasses import dataclass

import torch
from torch import Tensor

LOGIT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# What the contract demands of one row's numbers; both implementations raise these sentences.
UNIFORM_RULE = "a number outside [0, 1); draw uniforms from the half-open unit interval"
PARAMETER_RULES = {
    "temperature": "must be 0 (greedy) or a positive finite number",
    "top_k": "must be 0 (off) or a positive number of tokens",
    "top_p": "must lie in (0, 1]; 1 turns it off",
    "min_p": "must lie in [0, 1]; 0 turns it off",
    "repetition_penalty": "must be a positive finite number; 1 turns it off",
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """One call's tensors with consistent shapes; a parameter that is None is off for every row."""

    target_logits: Tensor  # [B, K + 1, V]
    draft_token_ids: Tensor  # [B, K]
    draft_logits: Tensor | None  # [B, K, V]
    temperature: Tensor  # [B]
    uniforms: Tensor  # [B, K + 1]
    num_draft_tokens: Tensor | None  # [B]
    draft_is_one_hot: Tensor | None  # [B] bool
    top_k: Tensor | None  # [B]
    top_p: Tensor | None  # [B]
    min_p: Tensor | None  # [B]
    repetition_penalty: Tensor | None  # [B]
    seen_token_counts: Tensor | None  # [B, V]

    def __post_init__(self) -> None:
        self._check_logits()
        batch, width, vocab = self.target_logits.shape
        expected = {
            "draft_token_ids": (batch, width - 1),
            "draft_logits": (batch, width - 1, vocab),
            "uniforms": (batch, width),
            "seen_token_counts": (batch, vocab),
        }
        for name in self.__slots__[1:]:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            shape = expected.get(name, (batch,))
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)} where target_logits of shape "
                    f"{[batch, width, vocab]} need {list(shape)}"
                )
            self._check_device(name, tensor, may_be_on_host=name not in expected)
        self._check_dtypes()

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, K, V."""
        batch, width, vocab = self.target_logits.shape
        return batch, width - 1, vocab

    def _check_logits(self) -> None:
        for name in ("target_logits", "draft_logits"):
            logits = getattr(self, name)
            if logits is not None and (logits.dim() != 3 or logits.dtype not in LOGIT_DTYPES):
                raise ValueError(
                    f"{name} is {logits.dtype} of shape {list(logits.shape)}; pass floating-point "
                    "logits of shape [B, positions, V]"
                )
        if self.target_logits.shape[1] == 0 or self.target_logits.shape[2] == 0:
            raise ValueError(
                f"target_logits of shape {list(self.target_logits.shape)} hold no row; "
                "pass K + 1 rows over a vocabulary of at least one token"
            )

    def _check_device(self, name: str, tensor: Tensor, *, may_be_on_host: bool) -> None:
        """Parameters of one number a row may stay on the host: reading them waits for nothing."""
        device = self.target_logits.device
        if tensor.device != device and not (may_be_on_host and tensor.device.type == "cpu"):
            raise ValueError(
                f"{name} is on {tensor.device} but target_logits are on {device}; move it there"
            )

    def _check_dtypes(self) -> None:
        if self.uniforms.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"uniforms are {self.uniforms.dtype}; draw them in float32 or float64, "
                "since coarser numbers bias the law"
            )
        for name in ("draft_token_ids", "num_draft_tokens", "top_k"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.is_floating_point() or tensor.dtype == torch.bool):
                raise ValueError(f"{name} is {tensor.dtype}; pass integers")
        if self.draft_is_one_hot is not None and self.draft_is_one_hot.dtype != torch.bool:
            raise ValueError(f"draft_is_one_hot is {self.draft_is_one_hot.dtype}; pass booleans")

    def check_parameters(self, *, host_only: bool = False) -> None:
        """Raise where a parameter is out of range; `host_only` reads nothing from a device."""
        for name, rule in PARAMETER_RULES.items():
            values = getattr(self, name)
            if values is None or (host_only and values.device.type != "cpu"):
                continue
            for row, value in enumerate(values.tolist()):
                if not parameter_allowed(name, value):
                    raise ValueError(f"{name}={value} of batch row {row} {rule}")


def parameter_allowed(name: str, value: float) -> bool:
    """True when a row may ask for this value; never for NaN."""
    finite = value < float("inf")
    if name == "top_p":
        return 0 < value <= 1
    if name == "min_p":
        return 0 <= value <= 1
    return finite and (value > 0 if name == "repetition_penalty" else value >= 0)


def bad_row(name: str, row: int, position: int, only_minus_inf: bool) -> ValueError:
    """The sentence for a logit row that is no law."""
    what = "is -inf for every token" if only_minus_inf else "holds NaN or +inf"
    return ValueError(
        f"{name} of batch row {row}, position {position} {what}; "
        "look for an overflow or an empty mask in the model that made it"
    )


def bad_draft_id(row: int, position: int, vocab: int) -> ValueError:
    """The sentence for a draft token that the vocabulary does not hold."""
    return ValueError(
        f"draft_token_ids of batch row {row}, position {position} is outside 0..{vocab - 1}; "
        "use -1 to end a row's draft"
    )


def bad_length(row: int, num_draft: int) -> ValueError:
    """The sentence for a row that claims more drafts than it has columns."""
    return ValueError(
        f"num_draft_tokens of batch row {row} is outside 0..{num_draft}; "
        "it counts columns of draft_token_ids"
    )


def bad_uniform(row: int) -> ValueError:
    return ValueError(f"uniforms of batch row {row} hold {UNIFORM_RULE}")


def missing_draft_logits(row: int) -> ValueError:
    return ValueError(
        f"draft_is_one_hot of batch row {row} is False but there are no draft_logits; "
        "pass the rows that its tokens were drawn from"
    )
