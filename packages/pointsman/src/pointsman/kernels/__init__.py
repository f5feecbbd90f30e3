"""Everything that runs on a GPU: tested and measured on one kind, an H200 (`docs/gpu.md`).

`experts/apply.py` calls `grouped_mm`, or, where that is chosen, `triton/`: our kernels, imported only where they run,
because the package `triton` is optional.
"""
