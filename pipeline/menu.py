"""The menu: every stage in one line, what is built for this config, and how to run."""

from collections.abc import Iterator

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pipeline.manifest import age
from pipeline.models import NotFetchedError, no_fetching
from pipeline.progress import duration
from pipeline.stage import Pipeline

ORDER = (
    "prepare",
    "regenerate",
    "finetune",
    "distill",
    "portfolio",
    "member",
    "memorise",
    "collect",
    "compare",
    "profile",
    "train_router",
    "evaluate",
    "export",
    "decode",
    "benchmark",
    "all",
)
USAGE = """\
python -m pipeline stage=all                                       everything, then what to deploy
python -m pipeline stage=evaluate build_missing=true               one stage and whatever it lacks
python -m pipeline stage=all data=jsonl data.train=my.jsonl         with your own prompts
python -m pipeline stage=all force=true                            build again what is there
python -m pipeline --cfg job                                       every key and its value"""


def show_menu(pipeline: Pipeline, console: Console) -> None:
    """Print the menu; fetches and builds nothing."""
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("stage", style="bold", no_wrap=True)
    table.add_column("what it does", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("built for this config", no_wrap=True)
    known = [name for name in ORDER if name in pipeline.stages]
    known += [name for name in pipeline.stages if name not in ORDER]
    for name in known:
        for label, state in _rows(pipeline, name):
            table.add_row(label, pipeline.stages[name].summary, state)
    console.print(Group(table, Text(), Text(USAGE, no_wrap=True, overflow="ignore")), crop=False)


def _rows(pipeline: Pipeline, name: str) -> Iterator[tuple[str, str]]:
    """A stage's line; a training stage has one for each drafter that it trains."""
    if pipeline.stages[name].repeats:
        yield name, "-"
        return
    entries = pipeline.groups["pool"].entries
    trained = [key for key, entry in entries.items() if entry.stage == name]
    if name == "portfolio":
        shared = any(entry.trained_by == name for entry in entries.values())
        yield name, _state(pipeline, name, None) if shared else "nothing to train in this pool"
    elif name not in ("finetune", "distill", "member", "memorise"):
        yield name, _state(pipeline, name, None)
    elif not trained:
        yield name, "nothing to train in this pool"
    for entry in trained:
        yield f"{name} ({entry})", _state(pipeline, name, entry)


def _state(pipeline: Pipeline, name: str, entry: str | None) -> str:
    """As in "found 1a2b3c4d (2 h 3 min ago)"."""
    groups = dict(pipeline.groups)
    if entry is not None:
        from pipeline.build import trained_need

        groups |= trained_need(groups["pool"], entry).groups
    elif name == "portfolio":
        from pipeline.build import portfolio_members

        groups["members"] = portfolio_members(groups["pool"])
    try:
        with no_fetching():
            artifact = pipeline.locate(name, groups)
        if not artifact.finished:
            return f"missing {artifact.signature[:8]}"
        since = age(artifact.folder)
    except NotFetchedError:
        return "missing (not fetched yet)"
    except ValueError as error:
        return f"cannot tell: {error}"
    return f"found {artifact.signature[:8]} ({duration(since)} ago)"
