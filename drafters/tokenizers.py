"""A drafter must speak the target's token ids: load its tokenizer and compare."""

from typing import Any


def load_tokenizer(name_or_path: str) -> Any:
    """The tokenizer of a drafter, or ValueError where its files are missing."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"no tokenizer could be loaded from {name_or_path} ({reason}); put the target's "
            "tokenizer.json and tokenizer_config.json beside the drafter's weights"
        ) from error


def num_real_ids(tokenizer: Any) -> int:
    """One more than the highest id that stands for a token; columns beyond it are padding."""
    return max(tokenizer.get_vocab().values()) + 1


def require_same_tokenizer(target: Any, drafter: Any, drafter_name: str) -> None:
    """Raise ValueError unless both give every id, special tokens included, to the same token."""
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    if ours == theirs:
        return
    token = min(set(ours.items()) ^ set(theirs.items()), key=lambda item: (item[1], item[0]))[0]
    raise ValueError(
        f"{drafter_name} has another tokenizer than the target (token {token!r} is id "
        f"{theirs.get(token)} there and {ours.get(token)} in the target); choose a drafter with "
        "the target's own tokenizer"
    )
