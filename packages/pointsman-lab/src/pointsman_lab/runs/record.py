"""A run as its directory describes it: settings, environment, results. A damaged file is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman._files import parse_json, read_json, read_text
from pointsman._values import finite
from pointsman_lab.runs.evaluation import clean_results
from pointsman_lab.runs.metrics import read_metrics
from pointsman_lab.runs.paths import AUDIT, CONFIG, DIAGNOSTICS, ENVIRONMENT, EVALUATION, EXPLORER, METRICS


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} where there is no such file; RunError where it is damaged."""
    return read_json(path) or {}


def refuse_model(folder: Path) -> None:
    """RunError for the folder of a Hugging Face model, which has a config.json, too: what can be done with it."""
    try:
        found = parse_json(read_text(folder / CONFIG, "replace"))
    except (OSError, ValueError):
        return
    if isinstance(found, dict) and "model_type" in found and "model" not in found:
        raise RunError(
            f"{folder} is a Hugging Face model, not a run: `pointsman audit {folder}` measures its routing and its "
            "loss at every k; `pointsman hf --help` says how to change its routers"
        )


@dataclass(frozen=True)
class RunRecord:
    """A run without its weights.

    Attributes:
        path: the run directory.
        router: the spec, which labels its row; several specs are joined by '|'.
        seed: of the run.
        config, environment, evaluation, diagnostics, explorer: the files of these names; {} where there is none.
        aside: where explorer.json is, of a run whose own folder is only read.
    """

    path: Path
    router: str
    seed: int
    config: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    aside: Path | None = None

    @property
    def done(self) -> bool:
        return bool(self.evaluation.get("results"))

    @property
    def is_audit(self) -> bool:
        """Whether this is the audit of a Hugging Face model (`pointsman audit`), not a run of ours."""
        return (self.path / AUDIT).is_file()

    @property
    def diagnostics(self) -> dict[str, Any]:
        return read_object(self.path / DIAGNOSTICS)

    @property
    def explorer(self) -> dict[str, Any]:
        return read_object((self.aside or self.path) / EXPLORER)

    @property
    def steps(self) -> int | None:
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def family(self) -> str | None:
        """Of the model; None where config.json names none (an older run's)."""
        value = self.config.get("model", {}).get("family")
        return value if isinstance(value, str) else None

    @property
    def num_experts(self) -> int | None:
        value = self.config.get("model", {}).get("num_experts")
        return value if isinstance(value, int) else None

    def metrics(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """Rows of metrics.jsonl of these kinds, in file order."""
        return read_metrics(self.path / METRICS, *kinds)

    def last_step(self) -> int:
        """The last step in metrics.jsonl; 0 where there is none."""
        return max((int(step) for row in self.metrics("train") if (step := finite(row.get("step")))), default=0)

    def results(self, split: str = "test") -> dict[int, Mapping[str, Any]]:
        """Clean results of the split by k; without that split, those of the first split that was evaluated."""
        return clean_results(self.evaluation, split)


def label(router: Any) -> str:
    """A router setting (a spec, or a list of specs) as one spec."""
    return "|".join(map(str, router)) if isinstance(router, list | tuple) else str(router)


def read_run(path: Path) -> RunRecord:
    """Reads a run directory; RunError where it is none."""
    refuse_model(path)
    config = read_object(path / CONFIG)
    if not config:
        raise RunError(f"{path}: no run directory (it has no {CONFIG})")
    model = config.get("model")
    router = label(model.get("router", "-")) if isinstance(model, dict) else "-"
    seed = config.get("seed", 0)
    evaluation = read_object(path / EVALUATION)
    return RunRecord(path, router, int(seed), config, read_object(path / ENVIRONMENT), evaluation)
