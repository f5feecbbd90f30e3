"""Functions that run while torch.compile traces. Imported only then, because this imports the compiler."""

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pointsman.ops import kernels
from pointsman.ops.gemm import GEMMS, choose

SHAPES_AND_DTYPES = 8  # torch's default limit for one function


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def allow_a_graph_for_each_k(num_experts: int) -> bool:
    """Raises torch's recompilation limits so that k may take all values from 1 to E, in training and in evaluation.

    k is static: torch compiles a graph when a schedule first reaches a value. Beyond its limit torch silently runs
    without graphs (with `fullgraph=True` it raises). The limit belongs to the process and is read before tracing, so a
    layer cannot have its own. `torch.compile(recompile_limit=…)` overrides it. This function runs during tracing and
    is not part of the graph.
    """
    config, wanted = torch.compiler.config, 2 * num_experts + SHAPES_AND_DTYPES
    config.recompile_limit = max(config.recompile_limit, wanted)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, wanted)
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def active_code() -> str:
    """`kernels.active().code` at the time of tracing."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():  # no part of a program of torch.export
        return kernels.active().code


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def active_gemm(dtype: torch.dtype) -> str:
    """The name in `GEMMS` of the products that are active at the time of tracing."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        gemm = choose(kernels.active().gemm, dtype)
    return next(name for name, one in GEMMS.items() if one is gemm)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def plain_wanted() -> bool:
    """`kernels.plain_wanted()` at the time of tracing."""
    chosen = kernels._chosen()
    return chosen is not None and chosen.path == "plain"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def active_gpu(what: str) -> str:
    """`kernels.active_gpu(what)` at the time of tracing."""
    chosen = kernels._chosen()
    return "auto" if chosen is None else str(getattr(chosen, what))
