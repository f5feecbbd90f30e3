"""Everything that runs on a GPU. No GPU has run it yet: Triton's interpreter has, and its compiler (`docs/gpu.md`).

`experts/apply.py` calls `grouped_mm`, or, where `choice` says so, `triton/`: our kernels, imported only where they run,
because the package `triton` is optional.
"""
