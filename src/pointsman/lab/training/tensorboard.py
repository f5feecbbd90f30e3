"""The lines of metrics.jsonl as TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman.diagnostics.monitor import scalars


class Board:
    """Writes lines of metrics as scalars; what an interrupted run wrote beyond `step` is dropped by the viewer."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RunError("tensorboard is not installed: pip install 'pointsman[track]'") from None
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        routing = [dict(row) for row in rows if row["kind"] == "routing"]
        values = scalars(routing)
        for row in rows:
            if row["kind"] == "train":
                names = ("loss", "bits", "top_k", "learning_rate", "gradient_norm", "tokens_per_second", "overhead")
                values |= {f"train/{name}": row[name] for name in names}
            elif row["kind"] == "valid":
                values[f"valid/{row['metric']}/k={row['top_k']}"] = row["value"]
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, rows[0]["step"])

    def close(self) -> None:
        self._writer.close()
