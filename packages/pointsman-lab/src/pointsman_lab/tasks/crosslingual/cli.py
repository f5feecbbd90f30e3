"""`pointsman evaluate` of runs that were fine-tuned on XTREME's tasks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pointsman._errors import RunError
from pointsman_lab.cli.evaluate import evaluated, settings_of
from pointsman_lab.cli.progress import Display, stop_on_signals


def is_crosslingual_run(run: Path) -> bool:
    """Whether this is the directory of a run fine-tuned on one of XTREME's tasks."""
    from pointsman._files import read_whole_json
    from pointsman_lab.tasks.crosslingual.xtreme import XTREME

    return str((read_whole_json(run / "finetune.json") or {}).get("task", "")).partition(":")[0] in XTREME


def evaluate(values: argparse.Namespace, device: str) -> int:
    """Evaluates a run that was fine-tuned on one of XTREME's tasks, and writes its predictions anew."""
    changes = settings_of(values, ())
    if values.data:
        raise RunError("pointsman evaluate: --data has no effect on fine-tuned runs; leave it out")
    from pointsman._files import within, write_whole
    from pointsman_lab.finetuning.run import finetuned_task, load_finetuned
    from pointsman_lab.report.language_table import LanguageTable
    from pointsman_lab.runs.record import RunRecord

    with Display() as display, stop_on_signals() as stop:
        saved = load_finetuned(values.run, device=device, note=display.note)
        task = finetuned_task(saved)
        record, file, config = evaluated(saved, task, values, changes, display, stop)
    split = values.split or task.reported_split(config)
    if split == "test":
        for name, content in task.result_files(config).items():
            write_whole(within(file.parent, *name.split("/")), content)
    run = RunRecord(values.run, config.model.router, config.seed, {}, evaluation=record)
    shown = LanguageTable.of([run], f"xtreme-{task.name}", split=split)
    assert shown is not None, "every result has languages"
    print(shown.text(), end="")
    print(f"\nsaved: {file}", file=sys.stderr)
    return 0
