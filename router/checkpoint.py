"""A router on disk (config.json, model.safetensors) and in use: a prompt -> a prior."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.types import Prior, Sampling
from router.calibration import Calibration
from router.encoder import Encoder
from router.features import FEATURE_VERSION, feature_matrix
from router.head import Head
from router.model import RouterModel, Standardiser
from router.population import Population, centre_of

SCHEMA_VERSION = 2
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class PopulationRouter:
    """The prior of the population alone: looks at the temperature, never at the text."""

    drafters: tuple[str, ...]
    population: Population

    def prior(self, text: str, num_prompt_tokens: int, sampling: Sampling) -> Prior:
        """The same belief for every prompt under one temperature."""
        return self._prior(sampling, None)

    def _prior(self, sampling: Sampling, prediction: tuple[Tensor, Tensor] | None) -> Prior:
        log_odds, sd, offsets = (values[0] for values in self.population.at(_row(sampling)))
        own, own_sd = (log_odds, sd) if prediction is None else prediction
        return Prior(
            mean=self._named(centre_of(own, own_sd)),
            sd=self._named(own_sd),
            population_mean=self._named(centre_of(log_odds, sd)),
            population_sd=self._named(sd),
            depth_offsets={
                name: tuple(row) for name, row in zip(self.drafters, offsets.tolist(), strict=True)
            },
            match_chance=self._named(self.population.match_chance_at(_row(sampling))[0]),
            source="population" if prediction is None else "router",
        )

    def _named(self, values: Tensor) -> dict[str, float]:
        return dict(zip(self.drafters, values.tolist(), strict=True))


@dataclass(frozen=True)
class LearnedRouter(PopulationRouter):
    """The prior of one prompt, from its embedding, its cheap features and the temperature."""

    model: RouterModel
    encoder: Encoder

    @torch.inference_mode()
    def prior(self, text: str, num_prompt_tokens: int, sampling: Sampling) -> Prior:
        """The belief for one prompt; `text` is what the person wrote, without a chat template."""
        features = feature_matrix([text], [num_prompt_tokens], [sampling.temperature])
        log_odds, sd = self.model.predict(self.encoder.encode([text]), features, _row(sampling))
        return self._prior(sampling, (log_odds[0], sd[0]))


def _row(sampling: Sampling) -> Tensor:  # [1]
    return torch.tensor([sampling.temperature], dtype=torch.float64)


def save_router(
    folder: Path,
    model: RouterModel,
    drafters: Sequence[str],
    encoder: Mapping[str, str],  # where its encoder comes from; "name_or_path" at least
    encoder_digest: str,
) -> None:
    """Write the two files of a router; `load_router` gives back the same numbers bit for bit."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "schema_version": SCHEMA_VERSION,
        "feature_version": FEATURE_VERSION,
        "drafters": list(drafters),
        "encoder": {**encoder, "digest": encoder_digest},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: value.detach().contiguous().clone() for name, value in _tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load_router(
    folder: Path, encoder: Encoder, drafters: Sequence[str] | None = None
) -> LearnedRouter:
    """The router of a folder; refuses another encoder, and other `drafters` than it knows."""
    config = read_config(folder, drafters)
    if encoder.digest != config["encoder"]["digest"]:
        raise ValueError(
            f"{folder / CONFIG} was trained on encoder {config['encoder']['name_or_path']} "
            f"(digest {config['encoder']['digest'][:12]}), but the encoder given has digest "
            f"{encoder.digest[:12]}; give the same encoder or run stage=train_router again"
        )
    model = _model(_load(folder), folder)
    return LearnedRouter(tuple(config["drafters"]), model.population, model, encoder)


def load_population(folder: Path, drafters: Sequence[str] | None = None) -> PopulationRouter:
    """The population prior of a router's folder; needs no encoder."""
    names = tuple(read_config(folder, drafters)["drafters"])
    return PopulationRouter(names, _model(_load(folder), folder).population)


def read_config(folder: Path, drafters: Sequence[str] | None = None) -> dict[str, Any]:
    """The router's config.json, checked against this version and the pool's names."""
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(
            f"{folder} is not a router: it has no {CONFIG}; run stage=train_router first"
        )
    config = json.loads(path.read_text(encoding="utf-8"))
    for key, version in (("schema_version", SCHEMA_VERSION), ("feature_version", FEATURE_VERSION)):
        if config.get(key) != version:
            raise ValueError(
                f"{path} has {key}={config.get(key)}, this version reads {version}; "
                "run stage=train_router again"
            )
    if drafters is not None and set(drafters) != set(config["drafters"]):
        raise ValueError(
            f"{path} knows the drafters {', '.join(config['drafters'])}, but the pool holds "
            f"{', '.join(drafters)}; run stage=train_router for this pool"
        )
    return config


def _tensors(model: RouterModel) -> dict[str, Tensor]:
    parts = {
        "population": model.population,
        "standardiser": model.standardiser,
        "calibration": model.calibration,
    }
    tensors = {
        f"{part}.{name}": value
        for part, owner in parts.items()
        for name, value in vars(owner).items()
    }
    tensors |= {f"head.{name}": value for name, value in model.head.state_dict().items()}
    return {**tensors, "sd": model.sd, "covariance": model.covariance}


def _load(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        return load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); run stage=train_router again"
        ) from error


def _model(tensors: Mapping[str, Tensor], folder: Path) -> RouterModel:
    def part(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(f"{prefix}."): value
            for name, value in tensors.items()
            if name.startswith(f"{prefix}.")
        }

    weights = part("head")
    try:
        hidden, num_inputs = weights["first.weight"].shape
        head = Head(num_inputs, hidden, weights["last.weight"].shape[0])
        head.load_state_dict(weights)
        return RouterModel(
            population=Population(**part("population")),
            standardiser=Standardiser(**part("standardiser")),
            head=head.requires_grad_(False),
            calibration=Calibration(**part("calibration")),
            sd=tensors["sd"],
            covariance=tensors["covariance"],
        )
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{folder / WEIGHTS} holds other tensors than a router ({error}); "
            "run stage=train_router again"
        ) from error
