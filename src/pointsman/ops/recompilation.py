"""What torch.compile asks for while it traces. Imported only then, because it imports the whole compiler."""

import torch

from pointsman.ops import kernels
from pointsman.ops.gemm import GEMMS, choose

BESIDE = 8  # torch's own limit for one function: shapes, dtypes


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def allow_a_graph_for_each_k(num_experts: int) -> bool:
    """Raises torch's recompilation limits so far that k may go from 1 to E, in training and in evaluation.

    k is static: a graph is captured when a schedule first reaches it. At the limit, torch would silently run without
    graphs (with `fullgraph=True` it would raise). torch keeps one limit for the process and reads it before it traces,
    so that no layer can have its own; a limit that is given to `torch.compile(recompile_limit=…)` stays as it is.
    Runs while torch traces a router, and is no part of the graph.
    """
    config, wanted = torch.compiler.config, 2 * num_experts + BESIDE
    config.recompile_limit = max(config.recompile_limit, wanted)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, wanted)
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def active_code() -> str:
    """`kernels.active().code` at the time of tracing."""
    return kernels.active().code


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def active_gemm(dtype: torch.dtype) -> str:
    """The name in `GEMMS` of the products that are active at the time of tracing."""
    gemm = choose(kernels.active().gemm, dtype)
    return next(name for name, one in GEMMS.items() if one is gemm)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def plain_wanted() -> bool:
    """`kernels.plain_wanted()` at the time of tracing."""
    chosen = kernels._chosen()
    return chosen is not None and chosen.path == "plain"
