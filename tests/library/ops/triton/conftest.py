"""Kernels in Triton's interpreter: in a process of its own, in which TRITON_INTERPRET is 1 from the start.

`tests/library/ops/test_triton.py` starts that process; by hand: TRITON_INTERPRET=1 pytest tests/library/ops/triton
"""

import importlib.util
import os

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
