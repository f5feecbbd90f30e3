"""Fine-tuning on classification tasks: from a pre-trained run to accuracy at every k, alone or for a comparison."""

from pointsman_lab.finetuning.classification import Classification
from pointsman_lab.finetuning.compare import compare_tasks
from pointsman_lab.finetuning.run import finetune, load_finetuned
from pointsman_lab.finetuning.settings import Finetuning

__all__ = ["Classification", "Finetuning", "compare_tasks", "finetune", "load_finetuned"]
