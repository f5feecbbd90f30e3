"""`pointsman diagnose RUN|MODEL`: routing diagnostics, comparisons with other models and earlier checkpoints."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pointsman_lab.cli.options import Parser, choose_device, overrides

EPILOG = """examples:
  pointsman diagnose runs/hyper
  pointsman diagnose runs/hyper --against runs/smoe
  pointsman diagnose runs/a --against runs/a/checkpoints/step-1000
  pointsman diagnose runs/compare-enwik8-tiny    # every router, over its seeds

The figures and their conventions: docs/diagnostics.md.
"""


def parser() -> Parser:
    flags = Parser("diagnose", "Routing diagnostics of a run or a model.", EPILOG)
    flags.add("target RUN|MODEL", "a run, a checkpoint, a comparison, or a Hugging Face model")
    flags.add("--data", "other data, in the run's vocabulary (default: the run's)")
    flags.add("--split", "default: the one that the run reports, mostly test", choices=("train", "valid", "test"))
    flags.add("--against OTHER", "another run or checkpoint; may be repeated", action="append", default=[])
    flags.add("--top-k", "k values to compare with its own (default: a run's; of a model none)")
    flags.add("--eval-tokens", "tokens to read (default: 50000)", default=50_000)
    told = "settings of a run: eval_batch_size, eval_segment_length, eval_memory_length"
    flags.common("where diagnostics.json goes (default: the run)", settings=told)
    return flags


def run(words: Sequence[str]) -> int:
    values = parser().read(words)
    device = choose_device(values.device)
    from pointsman_lab._files import check_writable, write_whole
    from pointsman_lab.cli.progress import Display
    from pointsman_lab.diagnosis import FILE, Settings, diagnose_path
    from pointsman_lab.report.summary import summary

    target = Path(values.target)
    out = values.out or (target if target.is_dir() and target.parent.name != "checkpoints" else Path())
    check_writable(out)
    tokens = None if values.eval_tokens == "all" else values.eval_tokens
    settings = Settings(values.data, values.split, tokens, values.top_k, device=device, changes=overrides(values.set))
    with Display() as display:
        found = diagnose_path(values.target, values.against, settings, display)
    write_whole(out / FILE, json.dumps(found, allow_nan=False) + "\n")
    print(summary(found))
    print(f"\nall figures: {out / FILE}", file=sys.stderr)
    return 0
