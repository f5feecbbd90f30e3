"""What code says to torch.compile while it traces. Imported only then, because this imports the compiler."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

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
def constant(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` at the time of tracing: a constant of the graph."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():  # no part of a program of torch.export
        return function(*arguments)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def untraced(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, as if nobody traced: a break in the graph."""
    return function(*arguments)
