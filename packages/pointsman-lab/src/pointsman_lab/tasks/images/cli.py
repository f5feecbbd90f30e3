"""What `evaluate --robust` does with runs on images."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pointsman._errors import RunError
from pointsman_lab.cli.progress import Display, stop_on_signals


def evaluate(values: argparse.Namespace, device: str) -> int:
    """`pointsman evaluate … --robust`: a run, or every run of a comparison, on shifted images; prints and saves."""
    from pointsman_lab.runs.comparison import read_plan
    from pointsman_lab.tasks.images.robust import Asked, comparison_robustness, save_robustness
    from pointsman_lab.training.run import load_run

    if values.set or values.attack:
        raise RunError("pointsman evaluate: --robust goes with neither --set nor --attack")
    if values.data:
        raise RunError("--data has no effect on --robust: the images are those of the run; --robust KIND:PATH")
    tokens = "run" if values.eval_tokens is None else None if values.eval_tokens == "all" else values.eval_tokens
    asked = Asked.parse(values.robust, split=values.split or "test", top_k=values.top_k, tokens=tokens)
    with Display() as display, stop_on_signals() as stop:
        if read_plan(values.run) is not None:
            comparison_robustness(
                values.run, asked, device=device, progress=display, stop=stop, predictions=bool(values.predictions)
            )
        else:
            saved = load_run(values.run, device=device, note=display.note)
            _, file = save_robustness(
                saved, asked, out=values.out, progress=display, stop=stop, predictions=bool(values.predictions)
            )
    from pointsman_lab.cli.runs import write_page
    from pointsman_lab.runs.comparison import read_comparison
    from pointsman_lab.runs.record import RunRecord
    from pointsman_lab.tasks.images.robust_table import robust_tables, shifted_images, table_of

    if read_plan(values.run) is None:
        read = RunRecord(file.parent, saved.config.model.router, saved.config.seed, {})
        print(table_of([read.router], file.stem, {(read.router, read.seed): shifted_images(read, file.stem)}).text())
        print(f"saved: {file}", file=sys.stderr)
        return 0
    for table in robust_tables(read_comparison(values.run)):
        if table.name == Path(asked.file).stem:
            table.write(values.out or values.run)
            print(table.text())
    print(f"\n{write_page(values.run)}", file=sys.stderr)
    return 0
