"""Names of files and folders in run and comparison directories."""

import glob
import re
from pathlib import Path

from pointsman_lab._files import find, within

CONFIG, ENVIRONMENT, VOCABULARY = "config.json", "environment.json", "vocabulary.json"
METRICS, EVALUATION = "metrics.jsonl", "evaluation.json"
EXPLORER_FORMAT = 3
FINETUNE, DIAGNOSTICS, EXPLORER, AUDIT = "finetune.json", "diagnostics.json", "explorer.json", "audit.json"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
COMPARISON = "comparison.json"
REPEAT = 1000
"""The fine-tuning seed of repeat j from pre-training seed s is s + 1000 j."""


def slug(spec: str) -> str:
    """A spec as a folder name: letters, digits, '-', '_', '.', '=', '+'; ':' becomes ',', '|' becomes '~'."""
    return re.sub(r"[^A-Za-z0-9_.=+,~-]", "_", spec.replace(":", ",").replace("|", "~"))


def run_path(out: Path, router: str, seed: int) -> Path:
    """The run directory of one router and seed in the comparison directory `out`."""
    return within(out, "runs", slug(router), f"seed-{seed}")


def is_page(out: Path) -> bool:
    """Whether a name is that of a page, and not of a folder for it."""
    return out.suffix.lower() in (".html", ".htm")


def finetuned_path(run: Path | str, variant: str, seed: int) -> Path:
    """The default directory of a fine-tuning of `run`: RUN/finetune/VARIANT/seed-S."""
    return within(Path(run), "finetune", variant, f"seed-{seed}")


def finetuned_runs(run: Path, variant: str | None = None, having: str = CONFIG) -> list[Path]:
    """The directories of the fine-tunings of `run`, of one variant or of all, that have the file `having`."""
    return runs_in(run, f"finetune/{'*' if variant is None else glob.escape(variant)}", having)


def runs_in(folder: Path, rows: str, having: str = CONFIG) -> list[Path]:
    """The directories ROWS/seed-S in `folder` that have the file `having`; a copy beside one (seed-0.bak) is none."""
    found = (file.parent for file in find(folder, f"{rows}/seed-*/{having}"))
    return [run for run in found if re.fullmatch("seed-[0-9]+", run.name)]
