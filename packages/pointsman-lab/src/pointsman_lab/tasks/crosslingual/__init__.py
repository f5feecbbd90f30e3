"""XTREME's tasks: an encoder is fine-tuned on English and judged in every language with the same weights."""

from types import MappingProxyType

from pointsman_lab.registry import TaskEntry

EPILOG = """
XTREME's tasks, for encoders (tiny-mlm): xnli, pawsx, pawsx-test, udpos, panx,
tydiqa, xquad, mlqa, each also as NAME:languages=en+de. They are learned from
English alone, and all languages are scored; k is that of pre-training, the
length 128 or 384. Others: xnli-dev, pawsx-dev, panx-dev, xquad-tydiqa,
mlqa-dev. --task-preset finetune-xmoe: X-MoE's settings.
"""


class CrossLingualEntry(TaskEntry):
    name = "crosslingual"
    takes = ("encoder",)
    tuning = "pointsman_lab.tasks.crosslingual.task:CrossLingual"
    learned = "pointsman_lab.tasks.crosslingual.xtreme:XTREME"
    together = ("udpos", "panx", "xquad", "mlqa", "tydiqa", "xnli", "pawsx")
    epilogs = MappingProxyType({"finetune": EPILOG})


TASK = CrossLingualEntry()
