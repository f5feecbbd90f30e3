"""Fine-tuning on classification tasks: from a pre-trained run to accuracy at every k, alone or for a comparison."""

from pointsman.lab.finetuning.classification import Classification
from pointsman.lab.finetuning.compare import compare_tasks
from pointsman.lab.finetuning.run import finetune, load_finetuned
from pointsman.lab.finetuning.settings import Finetuning

__all__ = ["Classification", "Finetuning", "compare_tasks", "finetune", "load_finetuned"]
