"""Triton kernels outside the experts: the router, attention with relative positions, the mixers.

The package `triton` is optional: `ops.on_gpu` says whether it can be used. The tests run every kernel in Triton's
interpreter on a CPU, and compile it for GPUs that are not there (`docs/gpu.md`).
"""
