"""All checks, and the function that runs them on one router."""

import inspect
from collections.abc import Callable, Sequence

import torch

from pointsman.routers.frame.registry import BASELINES, parse_spec
from pointsman.testing import flags, layer, routing, steps
from pointsman.testing.case import Case

Check = Callable[[Case], None]

CHECKS: tuple[Check, ...] = (
    routing.bad_input,
    routing.shapes_and_sums,
    steps.state_moves_where_declared,  # and the next, before others that their breach breaks, too
    flags.stochastic_flag,
    routing.k_of_all_experts,
    routing.odd_sizes,
    routing.one_sequence,
    routing.precision,
    routing.half_precision_input,
    routing.autocast,
    flags.causal_flag,
    flags.segments,
    flags.batch_invariant_flag,
    routing.padding,
    routing.state_dict,
    layer.gradients,
    layer.nothing_to_do,
    steps.equals_the_reference,
    steps.statistics,
    steps.losses_of_their_own,
    layer.activation_checkpointing,
    layer.delivered_losses,
    layer.in_place_work_after_the_layer,
    layer.hooks_on_the_experts,
    layer.records,
    layer.replayed,
    steps.resumed,
    layer.materialized,
    routing.compiles,
    layer.compiles_in_training,
    layer.trains_the_same_parameters,
)
"""The contract, a function a promise."""


def promise(check: Check) -> str:
    """What a check makes sure of, in one line."""
    return (inspect.getdoc(check) or check.__name__).splitlines()[0].rstrip(".")


def check_spec(spec: str) -> None:
    """ValueError unless the spec names a router."""
    if parse_spec(spec).router in BASELINES:
        raise ValueError(f"{spec!r} is a baseline without a router: there is no contract to check")


def check_router(spec: str, dim: int = 16, num_experts: int = 4) -> None:
    """Runs the contract on the router that `spec` names, which takes some seconds. Random state stays as it is.

    Args:
        spec: `name[:option=value]*[@choice[:option=value]*][+mixer[:option=value]*]`.
        dim: width of the hidden states.
        num_experts: E, at least 2.

    Raises:
        AssertionError: the first broken promise, with what was found.
        ValueError: an unknown name or option, or fewer than two experts.
    """
    check_spec(spec)
    if num_experts < 2:
        raise ValueError(f"check_router: num_experts={num_experts}: allowed are whole numbers from 2")
    hold(Case(spec, dim, num_experts), CHECKS)


def hold(case: Case, checks: Sequence[Check]) -> None:
    """Runs these checks; AssertionError: the first broken promise. Random state stays as it is."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        case.router()
        for check in checks:
            torch.default_generator.manual_seed(0)
            try:
                check(case)
            except Exception as error:
                found = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
                raise AssertionError(f"{case.spec} breaks the contract: {promise(check)} ({found})") from error
