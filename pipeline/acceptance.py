"""Acceptance on disk: for each (answer, drafter), the chance that each draft is kept."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    import pandas as pd

FILE = "acceptance.parquet"
SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "split": pa.string(),
        "domain": pa.string(),
        "family": pa.string(),
        "text": pa.string(),  # what the person wrote
        "num_prompt_tokens": pa.int32(),
        "law": pa.string(),
        "temperature": pa.float64(),
        "drafter": pa.string(),
        "num_tokens": pa.int32(),  # A, of the answer
        "max_depth": pa.int32(),  # D
        "accept": pa.list_(pa.float32()),  # [A, D] row-major; NaN: no proposal, or past the end
    }
)


class AcceptanceWriter:
    """Writes one parquet file that appears, when the block ends well, as a whole."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.partial = folder / f"{FILE}.partial"
        self._file = pq.ParquetWriter(self.partial, SCHEMA)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows; num_tokens and max_depth are taken from `accept`, an array [A, D]."""
        columns = {name: [row[name] for row in rows] for name in SCHEMA.names if name in rows[0]}
        tables = [np.asarray(row["accept"], dtype=np.float32) for row in rows]
        columns["num_tokens"] = [len(table) for table in tables]
        columns["max_depth"] = [table.shape[1] for table in tables]
        columns["accept"] = [table.ravel() for table in tables]
        self._file.write_table(pa.table(columns, schema=SCHEMA))

    def __enter__(self) -> "AcceptanceWriter":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if failure is not None:
            self.partial.unlink()
            return
        with self.partial.open("rb") as file:
            os.fsync(file.fileno())
        self.partial.replace(self.path)


def load_acceptance(folder: Path) -> "pd.DataFrame":
    """All rows, with `accept` as a float32 array [A, D].

    Raises ValueError where the file is missing or damaged.
    """
    path = folder / FILE
    if not path.exists():
        raise ValueError(f"{path} is missing; run stage=collect first")
    try:
        frame = pq.read_table(path, schema=SCHEMA).to_pandas()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is damaged ({error}); run stage=collect force=true") from error
    shapes = zip(frame["accept"], frame["num_tokens"], frame["max_depth"], strict=True)
    frame["accept"] = [
        np.asarray(flat, np.float32).reshape(rows, depth) for flat, rows, depth in shapes
    ]
    return frame
