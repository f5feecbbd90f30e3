"""Measures the GPU path in stages: python benchmarks/gpu [STAGE ...] --out DIR

Every stage is a process of its own with a time limit, is useful alone, and does not stop the next. What is measured
goes to DIR/STAGE.json as soon as it is known; a short table of all stages comes last. `--tiny --device cpu` is a dry
run with small sizes, whose figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

LIMITS = {"facts": 60, "tests": 240, "micro": 60, "layer": 180, "compiled": 90, "steps": 90, "run": 1500}
"""Seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="*", metavar="STAGE", help=f"of {', '.join(LIMITS)}; default: the first six")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes: a dry run")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of each stage, instead of its own")
    given = parser.parse_args()
    stages = given.stage or list(LIMITS)[:6]
    for stage in stages:
        if stage not in LIMITS:
            parser.error(f"unknown stage {stage!r}: allowed are {', '.join(LIMITS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    table = [run(stage, given.out, given.device, given.tiny, given.limit or LIMITS[stage]) for stage in stages]
    width = max(len(line) for line in table)
    print("-" * width, *table, "-" * width, sep="\n")
    return int(any(" failed" in line for line in table))


def run(stage: str, out: Path, device: str, tiny: bool, limit: float) -> str:
    """Runs a stage; its line of the table."""
    file = out / f"{stage}.json"
    script = Path(__file__).with_name("stages.py")
    command = [sys.executable, str(script), stage, str(file), device, str(int(tiny))]
    places = os.pathsep.join(filter(None, (str(script.parents[2]), os.environ.get("PYTHONPATH"))))  # tools.bench
    began = time.monotonic()
    with (out / f"{stage}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=limit, check=False,
                env={**os.environ, "PYTHONPATH": places},
            ).returncode  # fmt: skip
            ended = "done" if code == 0 else f"failed with code {code}: see {log.name}"
        except subprocess.TimeoutExpired:
            ended = "stopped at its limit"
    found = json.loads(file.read_text()) if file.exists() else {}
    return f"{stage:6} {time.monotonic() - began:6.1f} s  {ended}  {found.get('summary', '')}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
