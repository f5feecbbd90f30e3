"""Text attacks: language models and whole comparisons on texts whose words are changed."""

from types import MappingProxyType
from typing import Any

from pointsman._errors import RunError
from pointsman_lab.registry import TaskEntry

EXAMPLES = """  pointsman evaluate runs/hyper --attack word --attack-rate 0.01,0.025,0.05
  pointsman evaluate runs/compare --attack word      # every run, and tables
"""


class Attacks(TaskEntry):
    name = "attacks"
    tabler = "pointsman_lab.tasks.attacks.table:attack_tables"
    epilogs = MappingProxyType({"evaluate": EXAMPLES})

    def add_flags(self, command: str, flags: Any) -> None:
        if command != "evaluate":
            return
        from pointsman_lab.cli.options import numbers, whole

        add = flags.add_argument
        add("--attack", choices=("word",), help="chosen words become AAA")
        told = "share attacked (default: 0.025)"
        add("--attack-rate", type=numbers(0, 1), default=(0.025,), metavar="R,R", help=told)
        told = "seed of the choice of words (default: 0)"
        add("--attack-seed", type=whole(0), default=0, metavar="S", help=told)

    def run(self, command: str, flags: Any, values: Any, device: str) -> int | None:
        if command != "evaluate":
            return None
        if not values.attack:
            flags.without_effect(values, ("--attack-rate", "--attack-seed"), "without --attack")
            return None
        flags.without_effect(values, ("--predictions",), "on attacks")
        if values.set:
            raise RunError("pointsman evaluate: --set has no effect on attacks; leave it out")
        if (values.run / "finetune.json").is_file():
            raise RunError(f"--attack: {values.run} is a fine-tuned run; allowed are language models")
        from pointsman_lab.tasks.attacks.attacks import run_attacks

        return run_attacks(values, device)


TASK = Attacks()
