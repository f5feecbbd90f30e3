"""Fine-tuning on classification tasks: from a pre-trained run to accuracy at every k, alone or for a comparison."""

from pointsman.finetuning.compare import compare_tasks
from pointsman.finetuning.run import FinetunedRun, finetune, load_finetuned
from pointsman.finetuning.settings import Finetuning
from pointsman.finetuning.work import FineTuningWork

__all__ = ["FineTuningWork", "FinetunedRun", "Finetuning", "compare_tasks", "finetune", "load_finetuned"]
