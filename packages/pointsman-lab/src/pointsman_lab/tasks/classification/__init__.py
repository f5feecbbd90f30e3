"""Classification of texts: a pre-trained language model with a head, judged by accuracy."""

from types import MappingProxyType

from pointsman_lab.registry import TaskEntry

EPILOG = """
Texts of a language model's run: sst2, sst2-glue, sst5, imdb, banking77, or a
CSV, TSV or JSONL file or folder with text and label columns.
  pointsman finetune runs/hyper --task sst2
  pointsman finetune runs/hyper --task sst2 --from-scratch      # the control
  pointsman finetune runs/xmoe --task banking77 --freeze router,experts \\
    --balance 0,0.01,0.1 --seeds 5
  pointsman finetune runs/hyper --task reviews.csv:text=body:label=stars
Defaults are HyperRouter's: all experts chosen (k = N), Adam at 1e-4, batch 16
(imdb 4), 3 epochs (banking77 15), length 512, the last hidden state.
"""


class ClassificationEntry(TaskEntry):
    name = "classification"
    takes = ("transformer-xl", "decoder")
    tuning = "pointsman_lab.tasks.classification.task:Classification"
    learned = "pointsman_lab.tasks.classification.data:TASKS"
    learns_files = True
    epilogs = MappingProxyType({"finetune": EPILOG})


TASK = ClassificationEntry()
