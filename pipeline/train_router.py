"""Stage train_router: acceptance on known prompts -> what to expect on a new one."""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from decode.clock import Clock
from decode.types import Router, Sampling
from pipeline.acceptance import load_acceptance
from pipeline.manifest import write_json
from pipeline.models import EncoderConfig, resolve_encoder
from pipeline.progress import progress
from pipeline.stage import Need, Stage, Workspace
from router.calibration import reliability
from router.checkpoint import load_router, save_router
from router.encoder import Encoder, SentenceEncoder
from router.examples import Examples, Row, collect_examples
from router.head import HeadSettings
from router.model import FittedRouter, example_features, fit_router
from router.neighbours import fit_neighbours
from router.report import compare, measures

REPORTED = (
    "validation",
    "test",
    "paraphrase",
    "mixed",
)  # validation chose the settings: optimistic
TIMED_PROMPTS = 20


@dataclass(frozen=True, kw_only=True)
class TrainRouter(Stage):
    """Trains on router_train, calibrates on validation, reports on test and its variations."""

    format_version: ClassVar[int] = 2  # how often a drafter proposes anything
    reads: ClassVar[tuple[str, ...]] = ("encoder",)
    summary: ClassVar[str] = "learn from a prompt how far each drafter can be trusted"

    hidden: int
    penalties: list[float]
    learning_rate: float
    max_steps: int
    patience: int
    neighbours: list[int]
    num_resamples: int

    def __post_init__(self) -> None:
        for name in ("hidden", "max_steps", "patience", "num_resamples"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"stages.train_router.{name}={getattr(self, name)} must be at least 1"
                )
        for name in ("penalties", "neighbours"):
            if not getattr(self, name):
                raise ValueError(f"stages.train_router.{name} is empty; give values to choose from")

    def needs(self, groups: Any) -> dict[str, Need]:
        return {"acceptance": Need("collect")}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        examples = read_examples(workspace.inputs["acceptance"])
        config: EncoderConfig = workspace.groups["encoder"]
        encoder = SentenceEncoder(resolve_encoder(config), workspace.runtime.resolved_device())
        embed = _embedder(encoder, examples)
        fitted = self._fit(examples, embed, workspace.seed)
        source = {name: str(value) for name, value in asdict(config).items() if value is not None}
        save_router(workspace.out, fitted.model, examples.drafters, source, encoder.digest)
        _write_history(workspace.out, fitted)

        predictions = self._predict(examples, embed, fitted, workspace.seed)
        report = self._report(examples, predictions, workspace.seed)
        router = load_router(workspace.out, encoder, examples.drafters)  # as it will be used
        report["prior_milliseconds"] = _time_priors(
            router, examples, workspace.runtime.make_clock()
        )
        report["training"] = {
            "penalty": fitted.trained.penalty,
            "step": fitted.trained.step,
            "slope": _by_drafter(examples, fitted.model.calibration.slope),
            "bias": _by_drafter(examples, fitted.model.calibration.bias),
            "sd": _by_drafter(examples, fitted.model.sd),
        }
        write_json(workspace.out / "metrics.json", report)
        write_json(workspace.out / "predictions.json", _prediction_rows(examples, predictions))
        return _headline(report)

    def _fit(
        self, examples: Examples, embed: "Embed", seed: int, shuffle: bool = False
    ) -> FittedRouter:
        train, validation = examples.split("router_train"), examples.split("validation")
        if shuffle:
            train, validation = shuffled(train, seed), shuffled(validation, seed + 1)
        settings = HeadSettings(
            self.hidden, self.penalties, self.learning_rate, self.max_steps, self.patience
        )
        with progress("train_router", None, "steps") as meter:
            return fit_router(
                train, embed(train), validation, embed(validation), settings, seed, meter.advance
            )

    def _predict(
        self, examples: Examples, embed: "Embed", fitted: FittedRouter, seed: int
    ) -> dict[str, Tensor]:
        """Log-odds [P, N] by each method; `shuffled` learned from mismatched prompts."""
        train, validation = examples.split("router_train"), examples.split("validation")
        population = fitted.model.population
        neighbours = fit_neighbours(
            train, embed(train), validation, embed(validation), population, self.neighbours
        )
        everything = embed(examples), example_features(examples), examples.temperatures
        control = self._fit(examples, embed, seed, shuffle=True)
        log_odds, sd = fitted.model.predict(*everything)
        return {
            "router": log_odds,
            "population": population.at(examples.temperatures)[0],
            "neighbours": neighbours.log_odds(everything[0], examples.temperatures),
            "shuffled": control.model.predict(*everything)[0],
            "sd": sd,
        }

    def _report(
        self, examples: Examples, predictions: dict[str, Tensor], seed: int
    ) -> dict[str, Any]:
        splits: dict[str, Any] = {}
        methods = {name: values for name, values in predictions.items() if name != "sd"}
        for split in REPORTED:
            mask = (examples.splits == split) & (examples.trials.sum(1) > 0).numpy()
            if not mask.any():
                continue
            part, ours = examples.take(mask), {name: m[mask] for name, m in methods.items()}
            splits[split] = compare(ours, part, self.num_resamples, seed)
            splits[split]["domains"] = _by_domain(part, ours)
            splits[split]["reliability"] = {
                name: reliability(values, part.successes, part.trials)
                for name, values in ours.items()
            }
        return {"drafters": list(examples.drafters), "splits": splits}


Embed = Callable[[Examples], Tensor]


def read_examples(folder: Path) -> Examples:
    """The counts of an acceptance artifact; refuses one that lacks a split which training needs."""
    rows = load_acceptance(folder).itertuples(index=False)
    examples = collect_examples(cast(list[Row], list(rows)))
    for split in ("router_train", "validation"):
        if not examples.split(split).trials.sum() > 0:
            raise ValueError(
                f"{folder} holds no draft on a prompt of split {split}, which the router needs; "
                "raise that split's share in the data config"
            )
    return examples


def shuffled(examples: Examples, seed: int) -> Examples:
    """The same counts beside other prompts of the same law: nothing is left to learn."""
    generator = np.random.default_rng(seed)
    order = np.arange(len(examples))
    for temperature in torch.unique(examples.temperatures):
        place = np.flatnonzero((examples.temperatures == temperature).numpy())
        order[place] = generator.permutation(place)
    return examples.with_prompts_of(order)


def _embedder(encoder: Encoder, examples: Examples) -> Embed:
    """Embeds each different text once, now."""
    texts = list(dict.fromkeys(examples.texts))
    place = {text: number for number, text in enumerate(texts)}
    table = encoder.encode(texts)
    return lambda part: table[[place[text] for text in part.texts]]


def _by_drafter(examples: Examples, values: Tensor) -> dict[str, float]:
    return dict(zip(examples.drafters, values.tolist(), strict=True))


def _by_domain(part: Examples, methods: dict[str, Tensor]) -> dict[str, Any]:
    table = {}
    for domain in sorted(set(part.domains)):
        mask = part.domains == domain
        ours = part.take(mask)
        table[domain] = {name: measures(values[mask], ours) for name, values in methods.items()}
    return table


def _time_priors(router: Router, examples: Examples, clock: Clock) -> dict[str, float]:
    """Median and slowest milliseconds of a prior, encoder included, after a first call."""
    sampling, spent = Sampling(), []
    texts = list(dict.fromkeys(examples.texts))[: TIMED_PROMPTS + 1]
    for text in texts:
        started = clock.now()
        router.prior(text, len(text), sampling)
        spent.append((clock.now() - started) * 1e3)
    spent = spent[1:] or spent
    return {"median": statistics.median(spent), "slowest": max(spent)}


def _write_history(out: Path, fitted: FittedRouter) -> None:
    lines = [json.dumps({"step": step, **row}) for step, row in enumerate(fitted.trained.history)]
    (out / "history.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _prediction_rows(examples: Examples, predictions: dict[str, Tensor]) -> list[dict[str, Any]]:
    """What was expected and what came: one row a prompt, temperature and drafter."""
    rows = []
    for p in np.flatnonzero(np.isin(examples.splits, REPORTED)):
        for n, drafter in enumerate(examples.drafters):
            tokens = float(examples.trials[p, n])
            if tokens == 0:
                continue
            row = {
                "prompt_id": examples.prompt_ids[p],
                "split": examples.splits[p],
                "domain": examples.domains[p],
                "temperature": float(examples.temperatures[p]),
                "drafter": drafter,
                "tokens": tokens,
                "acceptance": float(examples.successes[p, n]) / tokens,
                "sd_logit": float(predictions["sd"][p, n]),
            }
            methods = (name for name in predictions if name != "sd")
            row |= {name: float(torch.sigmoid(predictions[name][p, n])) for name in methods}
            rows.append(row)
    return rows


def _headline(report: dict[str, Any]) -> dict[str, Any]:
    """The numbers that a person wants first, flat."""
    numbers: dict[str, Any] = {"prior_milliseconds": report["prior_milliseconds"]["median"]}
    for split, result in report["splits"].items():
        for method, values in result["methods"].items():
            numbers[f"{split}_nll_{method}"] = values["nll"]
        numbers[f"{split}_calibration_error"] = result["methods"]["router"]["calibration_error"]
        numbers[f"{split}_acceptance_error"] = result["methods"]["router"]["acceptance_error"]
        gain = result["router_minus"]["population"]["nll"]
        for key in ("difference", "low", "high"):
            numbers[f"{split}_nll_router_minus_population_{key}"] = gain[key]
    return numbers
