"""Campaigns of random programs: `make campaign`, or `python tests/campaigns --help`."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CAMPAIGNS = {
    "sequences": "sequences.Sequences", "commands": "commands.CommandLines", "damage": "strangers.Damage",
    "kills": "kills.Kills", "resources": "resources.Resources", "strangers": "strangers.Strangers",
    "company": "company.Company", "compositions": "compositions.Compositions",
}  # fmt: skip
"""Name -> module and class."""
PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/campaigns", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(CAMPAIGNS)} (default: all)")
    parser.add_argument("--seed", default="0", help="of the programs (default: 0; `random`: another one each time)")
    parser.add_argument("--count", type=int, help="units to check (default: what continuous integration does)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    parser.add_argument(
        "--failures", type=int, default=1, help="end after so many; above 1 none is shrunk (default: 1)"
    )
    parser.add_argument("--program", help="check this program only, as a failure prints it")
    values = parser.parse_args()
    if unknown := set(values.names) - CAMPAIGNS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(CAMPAIGNS)}")
    if values.program and len(values.names) != 1:
        parser.error("--program needs one NAME")
    names = values.names or list(CAMPAIGNS)
    if len(names) > 1:  # each in a process of its own: what one leaves in its process (hooks, threads) spoils no other
        flags = [word for word in sys.argv[1:] if word not in values.names]
        with ThreadPoolExecutor(2) as lanes:  # each waits a part of its time
            ended = list(lanes.map(lambda name: subprocess.run([sys.executable, __file__, name, *flags]), names))
        return int(any(one.returncode for one in ended))
    seed = int.from_bytes(os.urandom(4), "big") if values.seed == "random" else int(values.seed)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ |= dict.fromkeys(PROXIES, "http://127.0.0.1:9")  # nothing is downloaded
    os.environ.pop("POINTSMAN_DATA", None)
    import frame  # all that follows imports torch, which reads the environment

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    [name] = names
    with tempfile.TemporaryDirectory(prefix=f"campaign-{name}-") as made:
        folder = Path(made).resolve()
        os.environ |= {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "MPLCONFIGDIR": str(folder / "cache" / "matplotlib"),
        }
        (folder / "fixtures").mkdir()
        (folder / "programs").mkdir()
        module, kind = CAMPAIGNS[name].split(".")
        campaign = getattr(importlib.import_module(module), kind)()
        campaign.prepare(folder / "fixtures")
        if values.program:
            outcome = frame.outcome_of(campaign, json.loads(values.program), folder / "programs")
            print(outcome.failure or f"it holds: {dict(outcome.counts)}")
            held = outcome.failure is None
        else:
            count = values.count or campaign.usual
            held = frame.run(
                campaign, seed=seed, count=count, jobs=values.jobs, folder=folder / "programs",
                failures=values.failures,
            )  # fmt: skip
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
