"""Model cards: what a folder is, how to load it, what was measured and where."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.exported import DECODER


def front_matter(fields: Mapping[str, Any]) -> str:
    """YAML that the Hub reads; JSON values are YAML too, so no name can break it."""
    lines = [
        f"{key}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in fields.items()
        if value is not None and value != []
    ]
    return "\n".join(["---", *lines, "---", ""])


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; numbers get three decimals."""

    def cell(value: Any) -> str:
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        return text.replace("|", "\\|").replace("\n", " ")

    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def hub_name(name_or_path: str) -> str | None:
    """The name if it could be on the Hub; a local folder is nobody else's business."""
    return name_or_path if name_or_path.count("/") == 1 and name_or_path[0] not in "./~" else None


def drafter_card(
    name: str,
    described: Mapping[str, Any],  # its entry of decoder.json
    target: Mapping[str, Any],
    license_name: str,
    training: Mapping[str, Any],  # manifest of the artifact it comes from
    domains: Sequence[str],
    acceptance: str,  # a table
) -> str:
    """README.md of one trained drafter."""
    base, memory = hub_name(target["name_or_path"]), _memory(training)
    fields = {
        "license": license_name,
        "base_model": base,
        "base_model_relation": "finetune" if base and not memory else None,
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": ["speculative-decoding", "draft-model", "outrider"],
    }
    settings = training["identity"]["settings"]
    whole = described["pretrained"] is not None
    return f"""{front_matter(fields)}
# {name}: a drafter for {_short_name(target)}

It guesses tokens that {_short_name(target)} then verifies, so what is decoded is the target's own
text. Alone it is a weak model: do not use it to answer anybody.

## Use
```python
from pipeline import load_decoder

decoder = load_decoder("the folder that holds {DECODER}")
```
{_TRANSFORMERS if whole else ""}{_adapter(described)}{memory}
Its own tensors, without those it shares with the target, are in `own/`.

## Training
On the target's own answers to prompts of {", ".join(domains) or "all domains"}, by
stage={training["identity"]["stage"]} with these settings:
```json
{json.dumps(settings, indent=2, ensure_ascii=False)}
```

## Measured
{acceptance}

{_provenance(training)}
Target digests: `{json.dumps(target["digest"])}`
"""


_TRANSFORMERS = """
This folder is also a whole model for `transformers.AutoModelForCausalLM`, with the target's
tokenizer. If `draft_vocab.safetensors` is there, only the ids it lists were trained.
"""


def _adapter(described: Mapping[str, Any]) -> str:
    """What PEFT can do with the folder; empty where there is no adapter."""
    if described.get("adapter") is None:
        return ""
    base = described["config"]["base"]
    return f"""
`adapter/` holds the same as a PEFT adapter of rank {described["config"]["rank"]}, to be put on the
whole model of `{base}` in the same export: `PeftModel.from_pretrained(model_of_{base}, "adapter")`.
"""


def _memory(training: Mapping[str, Any]) -> str:
    """What a table gives away; empty for a drafter that has none."""
    if training["identity"]["stage"] != "memorise":
        return ""
    facts = training["metrics"]
    return f"""
The table holds the target's answers word for word ({facts["num_texts"]:,} of them,
{facts["num_tokens"]:,} tokens): whoever has this folder can read them.
"""


def router_card(
    report: Mapping[str, Any],  # metrics.json of train_router
    config: Mapping[str, Any],  # config.json of the router
    target: Mapping[str, Any],
    license_name: str,
    manifest: Mapping[str, Any],
) -> str:
    """README.md of the router."""
    fields = {
        "license": license_name,
        "base_model": hub_name(config["encoder"]["name_or_path"]),
        "tags": ["speculative-decoding", "router", "outrider"],
    }
    return f"""{front_matter(fields)}
# What to expect of {len(config["drafters"])} drafters on a prompt

Reads a prompt (embedding, cheap features, temperature) and says how likely each drafter's tokens
are to be accepted by {_short_name(target)}, with a spread: {", ".join(config["drafters"])}.

## Use
```python
from router.checkpoint import load_router
from router.encoder import SentenceEncoder

router = load_router(folder, SentenceEncoder(encoder_folder))
router.prior("Sort a list in Rust.", num_prompt_tokens=30, sampling=Sampling())
```
Encoder: {_short_name(config["encoder"])}, digest `{config["encoder"]["digest"]}`; another one is
refused. One prior took {report["prior_milliseconds"]["median"]:.1f} ms (median).

## Measured
NLL per drafted token (below 0: the router is better). `population` never looks at the prompt,
`neighbours` are the most similar training prompts, `shuffled` is a router trained on mismatched
prompts; validation was used to stop training and to calibrate.

{_router_table(report)}

## Limits
It was trained on some tens of prompts for each domain. On prompts unlike those it tends to the
population; policies mix it with the population, so that a wrong prior costs little.

{_provenance(manifest)}
"""


def export_card(content: Mapping[str, Any], license_name: str, acceptance: str) -> str:
    """README.md of the whole export."""
    rows = [
        [name, entry["kind"].rpartition(".")[2], entry["folder"] or "needs no weights"]
        for name, entry in content["drafters"].items()
    ]
    fields = {
        "license": license_name,
        "base_model": hub_name(content["target"]["name_or_path"]),
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "outrider"],
    }
    return f"""{front_matter(fields)}
# A decoder for {_short_name(content["target"])}

Drafters, a router and measured costs. The target's weights are not here: they are found by name,
or given as a folder. {_choices(content["target"])}

```python
from pipeline import load_decoder

decoder = load_decoder("this folder")
print(decoder.generate("Why is the sky blue?", max_new_tokens=64).texts[0])
```

{table(["drafter", "kind", "folder"], rows)}

## Measured
{acceptance}
"""


def _choices(target: Mapping[str, Any]) -> str:
    """What the target was measured with, and is opened with again."""
    return (
        f"`load_decoder` opens the target as it was evaluated: dtype {target['dtype']}, backend\n"
        f"{target['backend']} (on another kind of device the usual one there), exactness "
        f"{target['exactness']}."
    )


def acceptance_table(rows: Sequence[Sequence[Any]], split: str, num_prompts: int) -> str:
    """acceptance_rate by drafter, law and domain, with what it was measured on."""
    if not rows:
        return "No test prompts were scored."
    body = table(["drafter", "temperature", "domain", "acceptance_rate", "tokens"], rows)
    return (
        f"Chance that the first drafted token is accepted, on {num_prompts} prompts of the split "
        f"{split}, by teacher forcing on the target's answers:\n\n{body}"
    )


def _router_table(report: Mapping[str, Any]) -> str:
    rows = []
    for split, result in report["splits"].items():
        gain = result["router_minus"]["population"]["nll"]
        nll = {name: values["nll"] for name, values in result["methods"].items()}
        calibration = result["methods"]["router"]["calibration_error"]
        interval = f"{gain['difference']:+.4f} [{gain['low']:+.4f}, {gain['high']:+.4f}]"
        methods = [nll[name] for name in ("router", "population", "neighbours", "shuffled")]
        rows.append([split, result["num_prompts"], *methods, interval, calibration])
    header = ["split", "prompts", "router", "population", "neighbours", "shuffled"]
    return table([*header, "router - population, 95%", "calibration error"], rows)


def _short_name(model: Mapping[str, Any]) -> str:
    return model["name_or_path"].rstrip("/").rpartition("/")[2]


def _provenance(manifest: Mapping[str, Any]) -> str:
    hardware = manifest["hardware"]
    machine = hardware.get("gpu") or f"{hardware['cpu']}, {hardware['cores']} cores"
    packages = ", ".join(f"{name} {version}" for name, version in manifest["packages"].items())
    return (
        f"Made on {machine}; {packages}; commit {manifest['commit'] or 'unknown'}; "
        f"`{' '.join(manifest['command'])}`."
    )
