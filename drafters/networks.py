"""Networks that turn token ids into draft logits: cut out of a Llama-family model, or any causal LM whole."""

import copy
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

LLAMA_FAMILY = "model.layers, model.embed_tokens, model.norm, model.rotary_emb and a bias-free lm_head, as Llama, Mistral, Qwen2 and Qwen3 have"
# Configs that change logits outside the parts above: a cut would silently have another law than its model.
LOGIT_CHANGES = ("final_logit_softcapping", "logit_softcapping", "logits_scaling", "logit_scale")


class DraftNetwork(nn.Module):
    """Token ids -> logits over draft columns; what training optimises and a session decodes with."""

    draft_ids: Tensor | None  # [C] ascending ids of the draft columns; None: column c is id c
    model_config: Any  # of the donor's kind, with the number of layers that are in use

    @abstractmethod
    def forward(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, keep: Tensor | None = None
    ) -> (
        Tensor
    ):  # [B, T] right-padded -> [B, T, C]; with keep [B, T] bool of N true entries -> [N, C]
        """Teacher-forced logits: position i holds the law of token i + 1."""

    @abstractmethod
    def next_logits(self, token_ids: Tensor, cache: DynamicCache) -> Tensor:  # [1, n] -> [C]
        """Read n more tokens into the cache; the law of the token after the last."""


class CutNetwork(DraftNetwork):
    """Some layers of a donor, its embedding, a copy of its final norm, and its head or rows of it.

    `shared` says that the donor is the target: embedding and full head then stay the target's, outside of this
    module's parameters. The layers and the norm are copies and are trained. The head is trained only with `train_head`.
    """

    def __init__(
        self,
        donor: nn.Module,
        layers: list[int],
        train_head: bool,
        dtype: torch.dtype,
        shared: bool,
    ) -> None:
        super().__init__()
        self.trunk = cut_trunk(donor, layers, dtype, copied=shared or bool(layers))
        self.model_config = self.trunk.config
        self.train_head = train_head
        self.shared = shared
        frozen = (donor.get_input_embeddings(), donor.get_output_embeddings())
        if shared:
            self._borrowed = frozen  # a tuple hides them from parameters(), state_dict() and to()
        else:
            self.embedding, self.full_head = (module.requires_grad_(False) for module in frozen)
        self.register_buffer("draft_ids", None)
        self.register_buffer("head_rows", None, persistent=False)
        self.register_parameter("head", None)
        self.set_draft_ids(None)

    @property
    def frozen_parts(self) -> tuple[nn.Embedding, nn.Linear]:
        """The donor's embedding and full head."""
        return self._borrowed if self.shared else (self.embedding, self.full_head)

    @property
    def dtype(self) -> torch.dtype:
        return self.trunk.norm.weight.dtype

    def set_draft_ids(self, draft_ids: Tensor | None) -> None:
        """Choose the draft columns; the head becomes the donor's rows for them again."""
        rows = self.frozen_parts[1].weight.detach()
        self.draft_ids = None if draft_ids is None else draft_ids.to(rows.device)
        if self.draft_ids is not None:
            rows = rows[self.draft_ids]
        if self.train_head:
            self.head = nn.Parameter(rows.to(self.dtype, copy=True))
        elif self.draft_ids is not None:
            self.head_rows = rows.to(self.dtype)
        else:
            self.head_rows = None  # the donor's own head answers

    def head_weight(self) -> Tensor:  # [C, hidden size]
        if self.head is not None:
            return self.head
        return self.frozen_parts[1].weight if self.head_rows is None else self.head_rows

    def forward(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        states = self.trunk(
            inputs_embeds=self._embed(token_ids), attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        return self._project(states if keep is None else states[keep])

    def next_logits(self, token_ids: Tensor, cache: DynamicCache) -> Tensor:
        states = self.trunk(
            inputs_embeds=self._embed(token_ids), past_key_values=cache, use_cache=True
        ).last_hidden_state
        return self._project(states[0, -1])

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.frozen_parts[0](token_ids).to(self.dtype)

    def _project(self, states: Tensor) -> Tensor:
        weight = self.head_weight()
        return nn.functional.linear(states.to(weight.dtype), weight)


class WholeNetwork(DraftNetwork):
    """Any causal LM as it is, with its whole vocabulary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.model_config = model.config
        self.draft_ids = None

    def forward(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        logits = self.model(
            input_ids=token_ids, attention_mask=attention_mask, use_cache=False
        ).logits
        return logits if keep is None else logits[keep]

    def next_logits(self, token_ids: Tensor, cache: DynamicCache) -> Tensor:
        out = self.model(
            input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return out.logits[0, -1]


def is_llama_family(model: nn.Module) -> bool:
    """Whether layers of this causal LM can be cut out."""
    inner, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    parts = ("layers", "embed_tokens", "norm", "rotary_emb")
    plain = all(getattr(model.config, name, None) in (None, 1, 1.0) for name in LOGIT_CHANGES)
    return (
        plain
        and isinstance(head, nn.Linear)
        and head.bias is None
        and all(hasattr(inner, p) for p in parts)
    )


def cut_trunk(donor: nn.Module, layers: list[int], dtype: torch.dtype, copied: bool) -> nn.Module:
    """The donor's inner model with only these layers, in this order, and without its embedding."""
    inner: Any = donor.model
    depth = len(inner.layers)
    if not all(-depth <= layer < depth for layer in layers):
        raise ValueError(
            f"layers={layers} must be layers of the model, which has {depth}: 0..{depth - 1}, or from -1 down"
        )
    chosen = [layer % depth for layer in layers] or list(range(depth))
    config = copy.deepcopy(inner.config)
    config.num_hidden_layers = len(chosen)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in chosen]
    with torch.device("meta"):  # no memory and no time for weights that are replaced below
        trunk = type(inner)(config)
    for new, layer in zip(trunk.layers, chosen, strict=True):
        _adopt(new, inner.layers[layer], dtype, copied)
    _adopt(trunk.norm, inner.norm, dtype, copied)
    trunk.rotary_emb = copy.deepcopy(inner.rotary_emb)  # its frequencies stay float32
    trunk.embed_tokens = None
    stray = [name for name, tensor in trunk.state_dict().items() if tensor.is_meta]
    assert not stray, f"weights without a donor: {stray}"
    return trunk.eval().requires_grad_(True)


def _adopt(new: nn.Module, old: nn.Module, dtype: torch.dtype, copied: bool) -> None:
    state = {
        name: tensor.detach().to(dtype, copy=copied) for name, tensor in old.state_dict().items()
    }
    new.load_state_dict(state, assign=True)
