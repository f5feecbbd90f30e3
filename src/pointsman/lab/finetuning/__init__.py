"""Fine-tuning on classification tasks: from a pre-trained run to accuracy at every k, alone or for a comparison."""

from pointsman.lab.finetuning.compare import compare_tasks
from pointsman.lab.finetuning.run import FinetunedRun, finetune, load_finetuned
from pointsman.lab.finetuning.settings import Finetuning
from pointsman.lab.finetuning.work import FineTuningWork

__all__ = ["FineTuningWork", "FinetunedRun", "Finetuning", "compare_tasks", "finetune", "load_finetuned"]
