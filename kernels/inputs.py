"""The arguments of `verify`, checked once for both implementations."""

from dataclasses import dataclass

import torch
from torch import Tensor

LOGIT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

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

    @classmethod
    def of_target(
        cls,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        temperature: Tensor,
        num_draft_tokens: Tensor | None,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        repetition_penalty: Tensor | None,
        seen_token_counts: Tensor | None,
    ) -> "Inputs":
        """Of a call that asks neither for the drafter's law nor for uniforms."""
        uniforms = torch.zeros(target_logits.shape[:2], device=target_logits.device)
        return cls(
            target_logits,
            draft_token_ids,
            None,
            temperature,
            uniforms,
            num_draft_tokens,
            None,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            seen_token_counts,
        )

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
        if 0 in self.target_logits.shape:
            raise ValueError(
                f"target_logits of shape {list(self.target_logits.shape)} hold no row; "
                "pass K + 1 rows a sequence over a vocabulary of at least one token"
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

    def draft_lengths(self) -> Tensor:
        """Drafts in use [B]: within num_draft_tokens and before the first -1."""
        lengths = (self.draft_token_ids != -1).long().cumprod(-1).sum(-1)
        if self.num_draft_tokens is None:
            return lengths
        return torch.minimum(lengths, self.num_draft_tokens.to(lengths.device))

    def one_hot(self) -> Tensor:
        """True [B] where a row was drafted without chance."""
        device = self.target_logits.device
        if self.draft_is_one_hot is not None:
            return self.draft_is_one_hot.to(device)
        return torch.full((self.sizes[0],), self.draft_logits is None, device=device)

    def check_values(self) -> None:
        """Raise for the first number in use that breaks the contract; reads every logit in use."""
        self.check_parameters()
        batch, num_draft, vocab = self.sizes
        if self.num_draft_tokens is not None:
            for row, count in enumerate(self.num_draft_tokens.tolist()):
                if not 0 <= count <= num_draft:
                    raise ValueError(
                        f"num_draft_tokens of batch row {row} is {count}; it counts columns of "
                        f"draft_token_ids, 0..{num_draft}"
                    )
        ids, device = self.draft_token_ids, self.target_logits.device
        drafted = torch.arange(num_draft, device=device) < self.draft_lengths()[:, None]
        if where := _first(drafted & ((ids < 0) | (ids >= vocab))):
            raise ValueError(
                f"draft_token_ids of batch row {where[0]}, position {where[1]} is "
                f"{int(ids[where])}, outside 0..{vocab - 1}; use -1 to end a row's draft"
            )
        if where := _first(~((self.uniforms >= 0) & (self.uniforms < 1))):
            raise ValueError(
                f"uniforms of batch row {where[0]}, position {where[1]} is "
                f"{float(self.uniforms[where])}; draw from the half-open interval [0, 1)"
            )
        drawn = drafted & ~self.one_hot()[:, None]
        if self.draft_logits is not None:
            _check_rows("draft_logits", self.draft_logits, drawn)
        elif where := _first(drawn):
            raise ValueError(
                f"draft_is_one_hot of batch row {where[0]} is False but there are no draft_logits; "
                "pass the rows that its tokens were drawn from"
            )
        bonus = torch.ones(batch, 1, dtype=torch.bool, device=device)
        _check_rows("target_logits", self.target_logits, torch.cat([bonus, drafted], 1))

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


def _first(flags: Tensor) -> tuple[int, ...] | None:
    """Index of the first True, in reading order."""
    found = flags.nonzero()
    return tuple(found[0].tolist()) if len(found) else None


def _check_rows(name: str, logits: Tensor, used: Tensor) -> None:
    """Raise for the first row in use [B, positions] that is no law; its maximum tells."""
    width = int(used.sum(-1).max()) if used.shape[1] else 0  # rows in use come first
    whole = bool(used[:, :width].all())
    peaks = logits[:, :width].amax(-1) if whole else logits[used].amax(-1)
    if bool(peaks.isfinite().all()):
        return
    found = zip(used.nonzero().tolist(), peaks.flatten().tolist(), strict=True)
    for (row, position), peak in found:
        if not abs(peak) < float("inf"):
            what = "is -inf for every token" if peak == -float("inf") else "holds NaN or +inf"
            raise ValueError(
                f"{name} of batch row {row}, position {position} {what}; "
                "look for an overflow or an empty mask in the model that made it"
            )
