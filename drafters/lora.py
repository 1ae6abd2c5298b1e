"""A specialist for a few hundred kilobytes: low-rank adapters on another LM drafter of the pool.

LoRA (arXiv 2106.09685): a linear layer W answers with W x + (alpha / rank) B A x, and only A and B
are trained. Any number of adapters share one base; `merged` trades that memory for speed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drafters.base import BuildContext, DrafterConfig, target_parts
from drafters.checkpoint import read_description
from drafters.lm import LmDrafter
from drafters.lm import from_pretrained as lm_from_pretrained
from drafters.lm_files import PRETRAINED, export_lm, lm_facts
from drafters.lora_files import (
    PEFT_WEIGHTS,
    base_folder,
    fingerprint,
    load_lora,
    save_lora,
    write_adapter,
)
from drafters.lora_network import HEAD, LoraNetwork, on_top_of
from drafters.network_drafter import NetworkDrafter

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig(DrafterConfig):
    """Adapters on another entry of the pool."""

    base: str  # name of an lm drafter
    rank: int
    alpha: float  # an adapter's product counts alpha / rank times
    target_modules: list[str]  # names of linear layers, as q_proj; [all-linear]: every one
    train_head: bool  # an adapter on the output head too
    merged: bool  # decode with merged copies of the adapted layers; else on the base's own tensors
    init_seed: int  # of A; B starts at zero

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(
                f"rank={self.rank} must be at least 1 and alpha={self.alpha} positive; "
                "for example rank=16 alpha=32"
            )
        if not self.target_modules:
            raise ValueError(
                f"target_modules=[] adapts nothing; name linear layers, or use [{ALL_LINEAR}]"
            )

    @property
    def part_names(self) -> tuple[str, ...]:
        return (self.base,)

    def build(self, context: BuildContext) -> "LoraDrafter":
        """The drafter; with `context.weights` what LoraDrafter.save wrote, else the base's law."""
        base = self._base(context)
        head_rank = self.rank if self.train_head else 0
        network = on_top_of(base.trainable, head_rank, self.alpha / self.rank)
        _inject(self, network)
        network.start(self.init_seed)
        drafter = LoraDrafter(self, network, base)
        if context.weights is not None:
            drafter.load(context.weights)
            if self.merged:
                drafter.merge()
        return drafter

    def _base(self, context: BuildContext) -> LmDrafter:
        base = context.part(self.base, "adapter")
        if not isinstance(base, LmDrafter):
            raise ValueError(
                f"base={self.base} is a {type(base).__name__}, which has no layers to adapt; "
                "name an lm entry of the pool"
            )
        return base


class LoraDrafter(NetworkDrafter):
    """Guesses token by token with its base's network and adapters of its own.

    `trainable` holds the adapters beside the base's tensors, or, once merged, nothing to train.
    """

    kind = "lora"

    def __init__(self, config: LoraConfig, network: LoraNetwork, base: LmDrafter) -> None:
        super().__init__(network, base.parts)
        self.config = config
        self.base = base
        self.adapted = network
        self._measure()

    @cached_property
    def base_digest(self) -> dict[str, str]:
        """What tells the base's weights from others."""
        return fingerprint(self.base.trainable.own_tensors())

    def merge(self) -> None:
        """Decode with merged copies of the adapted layers from now on; adapters stay at hand."""
        self.trainable = self.adapted.merged()
        self._measure()

    def prepare_training(self) -> None:
        self.trainable = self.adapted
        super().prepare_training()

    def save(self, folder: Path) -> None:
        save_lora(self, folder)

    def load(self, folder: Path) -> None:
        """Take the adapters that save() wrote; refused on a base with other weights."""
        load_lora(self, folder)
        if self.trainable is not self.adapted:
            self.merge()

    def export_pretrained(self, folder: Path) -> None:
        export_lm(self.adapted.merged(), self.parts, lm_facts(self.base, PRETRAINED), folder)

    def export_adapter(self, folder: Path, base: str) -> None:
        """Write a PEFT adapter for the base's export_pretrained(), which `base` is the name of."""
        names = target_names(self.config.target_modules, self.adapted.layer_paths)
        names += [HEAD] if self.config.train_head else []
        settings = _peft_config(self.config, names, self.adapted.transposed, base)
        write_adapter(self.adapted, settings, self.vocab_size, folder)

    def _own(self) -> Iterable[Tensor]:
        shared = {tensor.data_ptr() for tensor in _tensors(self.base.trainable)}
        held = [*_tensors(self.adapted), *_tensors(self.trainable)]
        return {t.data_ptr(): t for t in held if t.data_ptr() not in shared}.values()


def from_pretrained(name_or_path: str, target: Any) -> LoraDrafter:
    """What save() wrote; its base lies beside it, as exports and side-by-side folders have it."""
    folder = Path(name_or_path)
    description = read_description(folder, "lora")
    config = LoraConfig(**description["config"])
    parts = target_parts(target)
    base = lm_from_pretrained(str(base_folder(folder, config.base)), parts)
    return config.build(BuildContext(parts, weights=folder, parts={config.base: base}))


def with_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """A whole model with the PEFT adapter of a folder; none of its tensors is missing or left over.

    PEFT itself goes on without those that it does not find.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    adapted: Any = PeftModel.from_pretrained(model, str(folder))
    wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    if stray := wanted ^ load_file(folder / PEFT_WEIGHTS).keys():
        raise ValueError(
            f"{folder} holds an adapter that does not fit the model (tensor {min(stray)}); "
            "run stage=export force=true"
        )
    return adapted.eval()


def _inject(config: LoraConfig, network: LoraNetwork) -> None:
    """Put PEFT's layers, still without weights, in place of those that are adapted."""
    from peft import inject_adapter_in_model

    names = target_names(config.target_modules, network.layer_paths)
    settings = _peft_config(config, names, network.transposed)
    # Weights on "meta" are drawn from no generator; LoraNetwork.start makes them.
    inject_adapter_in_model(settings, network.root, low_cpu_mem_usage=True)


def _peft_config(
    config: LoraConfig, names: list[str], transposed: bool, base: str | None = None
) -> Any:
    """PEFT's settings for these layers; `base` only names a model in files."""
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=config.rank,
        lora_alpha=int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,  # type: ignore[arg-type]
        target_modules=names,
        lora_dropout=0.0,  # training runs in evaluation mode, so it would never act
        bias="none",
        fan_in_fan_out=transposed,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=base is not None,
    )


def target_names(wanted: Iterable[str], layers: Iterable[str]) -> list[str]:
    """The last parts of paths, as PEFT takes them; ValueError for a name that matches nothing."""
    known = {path.rpartition(".")[2] for path in layers}
    names = set(wanted)
    if missing := sorted(names - known - {ALL_LINEAR}):
        raise ValueError(
            f"target_modules names {', '.join(missing)}, but the base has no such linear layer; "
            f"it has {', '.join(sorted(known))} ([{ALL_LINEAR}] takes every one)"
        )
    return sorted(known if ALL_LINEAR in names else names)


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]
