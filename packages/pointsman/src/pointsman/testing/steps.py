"""The contract of a router in training: exact gradients, what a step gathers and moves, losses, going on from a state.

One function a promise.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from pointsman.control import step_end
from pointsman.delivery import add_losses
from pointsman.layer import MoE
from pointsman.ops.kernels import PLAIN, using
from pointsman.testing.case import Case, context_for, declared, expect, expect_close, expect_equal, expect_same, route


def equals_the_reference(case: Case) -> None:
    """A layer's output and all its gradients are those of the plain reference, at a small width and at a wide one."""
    for width in (case.dim, 4 * case.dim):
        found: list[dict[str, Tensor]] = []
        for kernels in (None, PLAIN):
            layer, wide = replace(case, dim=width).layer(), replace(case, dim=width)
            hidden = wide.hidden().requires_grad_()
            torch.default_generator.manual_seed(3)
            with using(kernels):
                output = layer(hidden, context_for(layer.router, hidden.detach()))
                upper = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
                output.backward(upper)
            named = [("the input", hidden), *layer.named_parameters()]
            gradients = {f"the gradient of {name}": one.grad for name, one in named if one.grad is not None}
            found.append({"the output": output.detach(), **gradients})
        largest = max(1.0, *(float(one.abs().max()) for one in found[1].values() if one.numel()))  # as rounding does
        expect_same(found[0], found[1], f"width {width}", rtol=1e-4, atol=2e-5 * largest)


def statistics(case: Case) -> None:
    """What a step gathers counts real tokens: padding adds nothing, and micro-batches add up to the batch."""
    router, hidden, real = case.router(), case.hidden(), case.length - 3
    other = hidden[:1].clone()
    other[:, real:] = 5

    def gathered(*parts: tuple[Tensor, Tensor | None]) -> list[Tensor]:
        layer = case.layer()
        layer.router.balance = layer.router.balance or 0.5
        for rows, mask in parts:
            rows = rows.clone().requires_grad_()
            torch.default_generator.manual_seed(3)
            add_losses(layer(rows, context_for(layer.router, rows.detach(), padding_mask=mask)).sum(), layer).backward()  # type: ignore[no-untyped-call]
        return [one.double() for one in layer.router.gathered()]

    mask = torch.arange(case.length)[None] < real
    padded = gathered((hidden[:1], mask))
    for one, expected in zip(gathered((other, mask)), padded, strict=True):
        expect_close(one, expected, "a statistic with other padding", rtol=1e-4, atol=1e-5)
    if declared(router, "stochastic") or not declared(router, "batch_invariant"):
        return
    for one, expected in zip(padded, gathered((hidden[:1, :real], None)), strict=True):
        expect_close(one, expected, "a statistic with padding and without", rtol=1e-4, atol=1e-5)
    together, apart = gathered((hidden, None)), gathered((hidden[:1], None), (hidden[1:], None))
    for one, expected in zip(apart, together, strict=True):
        expect_close(one, expected, "a statistic of two micro-batches and of the batch", rtol=1e-4, atol=1e-5)


def state_moves_where_declared(case: Case) -> None:
    """`step_end` alone moves the state, and a router whose state it moves says so (`needs_step_end`)."""
    layer, hidden = case.layer(), case.hidden()
    saved = {name: one.clone() for name, one in layer.router.state_dict().items()}
    for training in (False, True):
        route(layer.router.train(training), hidden.square())  # fills whatever it caches
    before = {name: one.clone() for name, one in layer.router.named_buffers()} | saved

    def moved() -> list[str]:
        now = {**layer.router.state_dict(), **dict(layer.router.named_buffers())}
        return [name for name, one in before.items() if name in now and not torch.equal(one, now[name])]

    for training in (False, True):
        add_losses(layer.train(training)(hidden, context_for(layer.router, hidden)).sum(), layer).backward()  # type: ignore[no-untyped-call]
        expect(not moved(), f"a forward moves {', '.join(moved())}, which belongs in step_end")
    step_end(layer)
    expect(not moved() or layer.router.needs_step_end, f"step_end moves {', '.join(moved())}: needs_step_end is false")


def losses_of_their_own(case: Case) -> None:
    """A repeated batch has the losses of one; a copy of a layer has its own losses and gradients."""
    layer, hidden = case.layer(), case.hidden()
    layer.router.balance = layer.router.balance or 0.5
    if not (layer.router.training_stochastic or not layer.router.training_batch_invariant):
        once, twice = (route(layer.router, torch.cat([hidden] * times)).losses for times in (1, 2))
        for name, one in once.items():
            expect_close(twice[name], one, f"the loss {name!r} of a batch and of it twice", rtol=1e-4, atol=1e-6)
    found = []
    for other in (False, True):
        own = case.layer()
        own.router.balance = layer.router.balance
        copied = copy.deepcopy(own)
        if other:
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.mul_(2)
        total = torch.stack([hidden.new_zeros(()), *route(copied.router, hidden).losses.values()]).sum()
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        expect(all(one.grad is None for one in own.parameters()), "a copy's loss reaches the original")
        found.append([total.detach(), *(one.grad for one in copied.router.parameters() if one.grad is not None)])
    for left, right in zip(*found, strict=True):
        expect_equal(left, right, "a copy's loss changes with the original")


def resumed(case: Case) -> None:
    """A layer with the state_dict of another trains on bit for bit as that one does."""
    one, other = case.layer(), case.layer()

    def train(layer: MoE, steps: range) -> None:
        for step in steps:
            torch.default_generator.manual_seed(step)
            hidden = torch.randn(case.batch, case.length, case.dim)
            for rows in (hidden[:1], hidden[1:]):  # two micro-batches
                loss = layer(rows, context_for(layer.router, rows)).square().mean()
                add_losses(loss, layer).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for parameter in layer.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
                        parameter.grad = None
            step_end(layer)

    train(one, range(2))
    other.load_state_dict(one.state_dict())
    for layer in (one, other):
        train(layer, range(2, 4))
    for (name, left), right in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        expect_equal(left, right, f"{name} differs two steps later: is a state of the router no buffer?")
