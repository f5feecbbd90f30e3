"""Fine-tuning: from a pre-trained run to a task's figures at every k, alone or for a comparison."""

from pointsman_lab.finetuning.run import compare_tasks, finetune, open_run
from pointsman_lab.finetuning.settings import Finetuning

__all__ = ["Finetuning", "compare_tasks", "finetune", "open_run"]
