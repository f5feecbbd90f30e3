"""The disk format of runs and comparisons, without torch: each file's reader and writer stand side by side.

A run directory:

    config.json            the settings                        training/config.py
    environment.json       versions, machine, kernels          environment.py
    vocabulary.json        what the token ids stand for        data/vocabulary.py
    metrics.jsonl          a JSON object a line                record.py
    checkpoints/step-N/    weights and state, with checksums   checkpoints.py (tensors: training/checkpoint.py)
    evaluation.json        the final results                   record.py
    finetune/VARIANT/seed-S/   run directories of their own    paths.py

A comparison directory: comparison.json (comparison.py), record.jsonl (compact.py: its finished runs in one file) and
runs/ROUTER/seed-S/, run directories.
"""
