"""Room for one compiled graph for each k: imported only while torch.compile traces, as it brings the compiler along."""

import torch

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
