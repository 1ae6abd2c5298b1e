"""What there is to choose between, checked without loading anything."""

BACKENDS = ("auto", "native", "transformers")
EXACTNESS = ("bitwise", "law")


def check_choice(backend: str, exactness: str) -> None:
    """Raise ValueError, in one sentence, where there is no such choice."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend} is not known; use {', '.join(BACKENDS)}")
    if exactness not in EXACTNESS:
        raise ValueError(f"exactness={exactness} is not known; use {' or '.join(EXACTNESS)}")
    if backend == "transformers" and exactness == "bitwise":
        raise ValueError("exactness=bitwise is not to be had of transformers; use backend=native")
