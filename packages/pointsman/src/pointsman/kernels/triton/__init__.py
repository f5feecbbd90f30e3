"""Triton's kernels, one file a kind: read `language.py` first, then `function.py` for the experts.

The package `triton` is optional (`pip install 'pointsman[gpu]'`); `ops/kernels.py` says whether it can be used.
The tests run every kernel in Triton's interpreter on a CPU, and compile it for GPUs that are not there (`docs/gpu.md`).
"""
