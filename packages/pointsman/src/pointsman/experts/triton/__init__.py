"""The experts on a GPU as Triton kernels: `function.py` puts them together, one file a kind of kernel.

The package `triton` is optional (`pip install 'pointsman[gpu]'`); `on_gpu.without_triton` says whether it can be used.
The tests run every kernel in Triton's interpreter on a CPU, and compile it for GPUs that are not there (`docs/gpu.md`).
"""
