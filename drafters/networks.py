"""Networks that turn token ids into draft logits: cut out of a model, or any causal LM whole."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drafters.inner import (
    computed_twice,
    cut_trunk,
    fit_mask,
    inner_model,
    only,
    plain_head,
    set_checkpointing,
)

if TYPE_CHECKING:
    from transformers import DynamicCache

LLAMA_FAMILY = (
    "model.layers, model.embed_tokens, model.norm, model.rotary_emb and a bias-free lm_head, "
    "as Llama, Mistral, Qwen2 and Qwen3 have"
)


class DraftNetwork(nn.Module):
    """Token ids -> logits over draft columns; what training optimises and a session decodes with.

    Its precision is chosen when it is built: to(dtype) would round the rotary frequencies too.
    """

    draft_ids: Tensor | None  # [C] ascending ids of the draft columns; None: column c is id c
    model_config: Any  # of the donor's kind, with the number of layers that are in use

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,  # [B, T], padded at the end
        attention_mask: Tensor | None = None,  # [B, T]; packed rows: [B, 1, T, T] bool
        keep: Tensor | None = None,  # [B, T] bool with N true entries, or their places [N]
        position_ids: Tensor | None = None,  # [B, T]; None: the place in the row
    ) -> Tensor:  # [B, T, C]; with keep [N, C]
        """Teacher-forced logits: position i holds the law of token i + 1."""

    @abstractmethod
    def read(
        self,
        token_ids: Tensor,  # [B, n]
        cache: "DynamicCache",
        attention_mask: Tensor | None = None,  # [B, all read so far]; None: all are tokens
        position_ids: Tensor | None = None,  # [B, n]; None: what follows in the cache
    ) -> Tensor:  # [B, C]
        """Read n more tokens of each row into the cache; the law of the token after the last."""

    @abstractmethod
    def own_tensors(self) -> dict[str, Tensor]:
        """What training can change and what says how to read it, each tensor once, by name."""

    def next_logits(self, token_ids: Tensor, cache: "DynamicCache") -> Tensor:  # [1, n] -> [C]
        """`read` for a single row."""
        return self.read(token_ids, cache)[0]

    @property
    def splits(self) -> bool:
        """Whether logits are `states` times `head_weight` and nothing else."""
        return False

    def states(
        self,
        token_ids: Tensor,
        attention_mask: Tensor | None = None,
        keep: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:  # [B, T, H]; with keep [N, H]
        """What the head is applied to; only where `splits`."""
        raise NotImplementedError(f"{type(self).__name__} does not split")

    def head_weight(self) -> Tensor:  # [C, H]
        """Rows that answer; only where `splits`."""
        raise NotImplementedError(f"{type(self).__name__} does not split")

    @abstractmethod
    def checkpoint_layers(self, enabled: bool) -> None:
        """Whether training keeps each layer's input only, and computes the layer again backwards.

        Gradients stay the same; reading into a cache is not touched.
        """


class CutNetwork(DraftNetwork):
    """Some layers of a donor, its embedding, a copy of its final norm, and its head or rows of it.

    `shared` says that the donor is the target: embedding and full head then stay the target's,
    outside of this module's parameters. Layers and norm are copies and are trained; embedding and
    full head never are. The head is a trained copy only with `train_head`.
    """

    def __init__(
        self,
        donor: nn.Module,
        layers: list[int],
        *,
        train_head: bool,
        dtype: torch.dtype,
        shared: bool,
    ) -> None:
        super().__init__()
        self.trunk: Any = cut_trunk(donor, layers, dtype, copied=shared or bool(layers))
        self.model_config = self.trunk.config
        self.donor_class = type(donor).__name__
        self.train_head = train_head
        model: Any = donor
        frozen = (model.get_input_embeddings(), model.get_output_embeddings())
        self._frozen: tuple[nn.Embedding, nn.Linear] = frozen  # a tuple hides them from nn.Module
        if not shared:
            self.embedding, self.full_head = (part.requires_grad_(False) for part in frozen)
        self.register_buffer("draft_ids", None)
        self.register_buffer("head_rows", None, persistent=False)
        self.register_parameter("head", None)
        self.set_draft_ids(None)

    @property
    def dtype(self) -> torch.dtype:
        return self.trunk.norm.weight.dtype

    def set_draft_ids(self, draft_ids: Tensor | None) -> None:
        """Choose the draft columns; the head becomes the donor's rows for them again."""
        rows = self._frozen[1].weight.detach()
        self.draft_ids = None if draft_ids is None else draft_ids.to(rows.device)
        if self.draft_ids is not None:
            rows = rows[self.draft_ids]
        if self.train_head:
            self.head = nn.Parameter(rows.to(self.dtype, copy=True))
        elif self.draft_ids is not None:
            self.head_rows = rows.to(self.dtype)

    def head_weight(self) -> Tensor:  # [C, hidden size]
        """Rows that answer: trained, gathered, or all of the donor's."""
        if self.head is not None:
            return self.head
        return self._frozen[1].weight.detach() if self.head_rows is None else self.head_rows

    @property
    def shares_head(self) -> bool:
        """Whether the target's own head answers, whole: not trained, gathered or a donor's."""
        return self.head is None and self.head_rows is None and not hasattr(self, "full_head")

    @property
    def full_head_module(self) -> nn.Linear:
        return self._frozen[1]

    def full_head_weight(self) -> Tensor:  # [V, hidden size]
        """The donor's head with this network's rows at the draft ids."""
        rows = self._frozen[1].weight.detach().to(self.dtype, copy=True)
        columns = slice(None) if self.draft_ids is None else self.draft_ids
        rows[columns] = self.head_weight().detach().to(self.dtype)
        return rows

    def embedding_weight(self) -> Tensor:  # [V, hidden size]
        return self._frozen[0].weight.detach()

    @property
    def splits(self) -> bool:
        return True

    def states(
        self,
        token_ids: Tensor,
        attention_mask: Tensor | None = None,
        keep: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        with computed_twice(self.trunk):
            states = self.trunk(
                inputs_embeds=self._embed(token_ids),
                attention_mask=fit_mask(attention_mask, self.trunk.config, self.dtype),
                position_ids=position_ids,
                use_cache=False,
            ).last_hidden_state
        return only(states, keep)

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor | None = None,
        keep: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        return self._project(self.states(token_ids, attention_mask, keep, position_ids))

    def read(
        self,
        token_ids: Tensor,
        cache: "DynamicCache",
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        states = self.trunk(
            inputs_embeds=self._embed(token_ids),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return self._project(states[:, -1])

    def checkpoint_layers(self, enabled: bool) -> None:
        set_checkpointing(self.trunk, enabled)

    def own_tensors(self) -> dict[str, Tensor]:
        frozen = ("embedding.", "full_head.")
        return {n: t for n, t in _each_once(self).items() if not n.startswith(frozen)}

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self._frozen[0](token_ids).detach().to(self.dtype)  # no gradient for the target

    def _project(self, states: Tensor) -> Tensor:
        weight = self.head_weight()
        return nn.functional.linear(states.to(weight.dtype), weight)


class WholeNetwork(DraftNetwork):
    """Any causal LM as it is, with its whole vocabulary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self.model_config = model.config
        self.draft_ids = None

    @property
    def splits(self) -> bool:
        return plain_head(self.model)

    def states(
        self,
        token_ids: Tensor,
        attention_mask: Tensor | None = None,
        keep: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        states = self._run(
            inner_model(self.model), token_ids, attention_mask, position_ids
        ).last_hidden_state
        return only(states, keep)

    def head_weight(self) -> Tensor:  # [C, hidden size]
        return self.model.get_output_embeddings().weight

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor | None = None,
        keep: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        logits = self._run(self.model, token_ids, attention_mask, position_ids).logits
        return only(logits, keep)

    def read(
        self,
        token_ids: Tensor,
        cache: "DynamicCache",
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        out = self.model(
            input_ids=token_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def checkpoint_layers(self, enabled: bool) -> None:
        set_checkpointing(self.model, enabled)

    def _run(
        self,
        model: nn.Module,
        token_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
    ) -> Any:
        dtype = next(self.model.parameters()).dtype
        with computed_twice(model):
            return model(
                input_ids=token_ids,
                attention_mask=fit_mask(attention_mask, self.model.config, dtype),
                position_ids=position_ids,
                use_cache=False,
            )

    def own_tensors(self) -> dict[str, Tensor]:
        return _each_once(self)


def is_llama_family(model: nn.Module) -> bool:
    """Whether this causal LM can be taken apart."""
    inner, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    parts = ("layers", "embed_tokens", "norm", "rotary_emb")
    return head is not None and plain_head(model) and all(hasattr(inner, part) for part in parts)


def _each_once(network: nn.Module) -> dict[str, Tensor]:
    """The state by name; of tied weights only the first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())
