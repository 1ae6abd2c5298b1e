"""What a person sees when something goes wrong: one sentence and an exit code."""

import errno
import logging
import os
import sys
import warnings
from pathlib import Path

from rich.logging import RichHandler

from pipeline.config import ConfigError
from pipeline.progress import console

log = logging.getLogger(__name__)

ROOMS = Path(__file__).parent.parent
QUIET = (
    *("transformers", "datasets", "huggingface_hub", "httpx", "httpx2", "urllib3", "filelock"),
    *("wandb", "torch", "accelerate", "sentence_transformers", "matplotlib", "fsspec", "peft"),
)
DISK = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
ACCESS = {errno.EACCES: "permission denied", errno.EROFS: "the file system is read-only"}
STOPPED, WRONG_CONFIG, FAILED = 130, 2, 1


def exit_code(error: BaseException) -> tuple[int, str] | None:
    """Code and sentence for what a person can put right; None for this program's own mistakes."""
    if isinstance(error, KeyboardInterrupt):
        return STOPPED, "stopped; what is finished is kept, and the same command goes on from there"
    if isinstance(error, ConfigError):
        return WRONG_CONFIG, str(error)
    if isinstance(error, ValueError):
        return FAILED, str(error) if _is_ours(error) else f"{error} (debug=true shows where)"
    if isinstance(error, OSError) and error.errno in DISK | ACCESS:
        where = error.filename or "what is being built"
        remedy = "free some space" if error.errno in DISK else "choose a folder with root=FOLDER"
        text = (DISK | ACCESS)[error.errno]
        return FAILED, f"{where} cannot be written: {text}; {remedy} and run the same command again"
    return None


def _is_ours(error: BaseException) -> bool:
    """Whether this project raised it, in words meant for a person."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return True
    path = Path(trace.tb_frame.f_code.co_filename)
    return ROOMS in path.parents and "site-packages" not in path.relative_to(ROOMS).parts


class _Lines(logging.Formatter):
    """A time, then the message; a warning says that it is one."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"warning: {text}" if record.levelno >= logging.WARNING else text


def set_up_logging(debug: bool) -> None:
    """Our log lines on stderr; from libraries only what is an error (in debug, all of it)."""
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(
            console=console, show_level=False, show_path=False, log_time_format="%H:%M:%S"
        )
        handler.setFormatter(_Lines("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Lines("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    if debug:
        return
    warnings.filterwarnings("ignore")
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    quiet |= {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
