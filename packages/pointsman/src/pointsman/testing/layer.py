"""The contract of a router inside a layer: gradients, losses, checkpointing, records. One function a promise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pointsman.control import materialize, set_top_k, step_end
from pointsman.delivery import add_losses, losses, set_loss_scale
from pointsman.layer import MoE
from pointsman.recording import record_routing
from pointsman.replay import replay_routing
from pointsman.routing import Routing, RoutingContext
from pointsman.testing.case import Case, context_for, expect, expect_close, expect_equal, expect_same, route


def gradients(case: Case) -> None:
    """Every trainable parameter of the router and the input get a finite gradient; buffers get none."""
    layer, k = case.layer(top_k=min(3, case.num_experts)), min(3, case.num_experts)
    set_top_k(layer, case.num_experts if layer.router.fixed_k else k)
    hidden = case.hidden().requires_grad_()
    torch.default_generator.manual_seed(3)
    add_losses(layer(hidden, context_for(layer.router, hidden)).square().mean(), layer).backward()  # type: ignore[no-untyped-call]
    expect(hidden.grad is not None and bool(torch.isfinite(hidden.grad).all()), "the input's gradient")
    for name, parameter in layer.router.named_parameters():
        expect(parameter.grad is not None, f"{name}: no gradient")
        assert parameter.grad is not None
        expect(bool(torch.isfinite(parameter.grad).all()), f"{name}: a gradient that is not finite")
        if name != "score.bias":  # a common shift cancels
            expect(bool(parameter.grad.any()), f"{name}: the gradient is 0")
    layer.requires_grad_(True)
    for name, buffer in layer.router.named_buffers():
        expect(not buffer.requires_grad, f"the buffer {name} can be trained")


def nothing_to_do(case: Case) -> None:
    """No token, no sequence, and padding alone pass the layer, forward and backward, in float32 and bf16: no NaN."""
    for dtype in (torch.float32, torch.bfloat16):
        for batch, length in ((2, 0), (0, 5), (2, 3)):
            layer, hidden = case.layer().to(dtype), torch.randn(batch, length, case.dim, dtype=dtype)
            mask = torch.zeros(batch, length, dtype=torch.bool) if hidden.numel() else None
            for name, one in step(layer, hidden, layer, padding_mask=mask).items():
                told = f"{batch} sequences of {length} tokens, none real: {name} is not finite"
                expect(bool(torch.isfinite(one).all()), told)


def activation_checkpointing(case: Case) -> None:
    """Activation checkpointing changes no output, gradient or state, in a step of two micro-batches."""

    def run(checkpointed: bool) -> list[Tensor]:
        layer, found = case.layer(dropout=0.1), []
        torch.default_generator.manual_seed(3)
        for hidden in (case.hidden(), -case.hidden()):
            hidden.requires_grad_()
            context = context_for(layer.router, hidden.detach())
            output = checkpoint(layer, hidden, context, use_reentrant=False) if checkpointed else layer(hidden, context)
            add_losses(output.square().sum(), layer).backward()  # type: ignore[no-untyped-call]
            assert hidden.grad is not None
            found += [output, hidden.grad]
        step_end(layer)
        trained = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        return [*found, *trained, *layer.router.buffers()]

    for plain, again in zip(run(False), run(True), strict=True):
        expect_close(plain, again, "with and without checkpointing")


def delivered_losses(case: Case) -> None:
    """The balance loss is above 0 and reaches the router's gradients, through add_losses or the layer's output."""
    hidden = case.hidden()
    for attach, scale in ((False, 1.0), (False, 2.0), (True, 0.0), (True, 2.0)):
        layer = case.layer(attach_losses=attach)
        layer.router.balance = 0.5
        context = context_for(layer.router, hidden)
        layer.requires_grad_(False)
        trained = {name: one.requires_grad_(True) for name, one in layer.router.named_parameters()}
        output, routing = layer(hidden.clone().requires_grad_(), context, return_routing=True)
        expect(float(losses(layer)[""]["balance"]) > 0, "the balance loss is 0")
        live = [loss for loss in routing.losses.values() if loss.requires_grad and trained]
        wanted: list[Tensor | None] = [None] * len(trained)
        if live:
            total = torch.stack(live).sum()
            wanted = list(torch.autograd.grad(total, list(trained.values()), retain_graph=True, allow_unused=True))
        reached = any(one is not None and bool(one.any()) for one in wanted)
        expect(reached or not trained or not case.must_show, "no loss has a gradient")
        main = output.sum() * 0
        if attach:
            set_loss_scale(layer, scale)
            main.backward()
        else:
            (add_losses(main, layer) * scale).backward()  # type: ignore[no-untyped-call]
        for (name, parameter), one in zip(trained.items(), wanted, strict=True):
            zero = torch.zeros_like(parameter)
            given = zero if parameter.grad is None else parameter.grad
            expect_close(given, zero if one is None else scale * one, f"{name}: the gradient at loss scale {scale:g}")


def in_place_work_after_the_layer(case: Case) -> None:
    """Work in place on the layer's output changes no gradient."""
    layer, hidden = case.layer(), case.hidden()
    layer.router.balance = 0.5
    found: list[list[Tensor | None]] = []
    for in_place in (False, True):
        layer.zero_grad()
        torch.default_generator.manual_seed(3)
        output = layer(hidden, context_for(layer.router, hidden))
        changed = output.add_(hidden) if in_place else output + hidden
        add_losses(changed.square().sum(), layer).backward()  # type: ignore[no-untyped-call]
        found.append([None if p.grad is None else p.grad.clone() for p in layer.parameters()])
    for left, right in zip(*found, strict=True):
        same = left is right if left is None or right is None else torch.equal(left, right)
        expect(same, "a gradient differs")


def hooks_on_the_experts(case: Case) -> None:
    """Forward and backward hooks on the experts see their output, which nothing changes later."""

    def doubled(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return 2 * output.tanh()  # which keeps its result for backward

    layer, hidden = case.layer(), case.hidden().requires_grad_()
    calls: list[object] = []
    layer.router.balance = 0.5
    layer.experts.register_forward_hook(doubled)
    layer.experts.register_full_backward_hook(lambda module, inputs, outputs: calls.append(outputs))
    add_losses(layer(hidden, context_for(layer.router, hidden)).square().sum(), layer).backward()  # type: ignore[no-untyped-call]
    expect(len(calls) == 1, f"the backward hook ran {len(calls)} times")
    expect(all(parameter.grad is not None for parameter in layer.experts.parameters()), "an expert without gradient")


def records(case: Case) -> None:
    """record_routing keeps the last routing of each layer, detached, or hands each on to a callback."""
    block, hidden = case.layer(), case.hidden()
    model = nn.ModuleDict({"block": block})
    context = context_for(block.router, hidden)
    with record_routing(model) as recorded:
        block(hidden, context)
    expect(list(recorded) == ["block"], f"recorded: {list(recorded)}")
    expect(not recorded["block"].weights.requires_grad, "recorded weights are not detached")
    seen: list[tuple[str, Any]] = []

    def callback(name: str, routing: Routing, given: RoutingContext | None) -> None:
        seen.append((name, given))

    with record_routing(model, callback):
        block(hidden, context)
    block(hidden, context)
    expect(seen == [("block", context)], f"the callback saw {len(seen)} forwards instead of 1")


def replayed(case: Case) -> None:
    """A replayed routing has the recorded experts and gives the same output and gradients, or is refused."""
    block = case.layer()
    model, router = nn.ModuleDict({"block": block}), block.router

    def run(experts: Mapping[str, Routing]) -> tuple[Routing, dict[str, Tensor]]:
        hidden = case.hidden().requires_grad_()
        context = context_for(router, hidden.detach())
        torch.default_generator.manual_seed(3)
        block.zero_grad()
        with replay_routing(model, experts), record_routing(model) as recorded:
            output = block(hidden, context)
        add_losses(output.square().sum(), model).backward()  # type: ignore[no-untyped-call]
        trained = {f"{name}'s gradient": one.grad for name, one in block.named_parameters() if one.grad is not None}
        assert hidden.grad is not None
        return recorded["block"], {"the output": output, "the input's gradient": hidden.grad, **trained}

    for training in (True, False):
        model.train(training)
        if router.capacity is not None:
            continue  # what was dropped is not in the record, and weights are renormalised without it
        before, wanted = run({})
        try:
            again, found = run({"block": before})
        except ValueError as refusal:
            expect("replay" in str(refusal), f"a refusal must say what was refused, got {str(refusal)!r}")
            return
        expect_equal(again.experts, before.experts, "experts")
        expect_close(again.weights, before.weights, "weights")
        expect_same(found, wanted, "replayed", rtol=1e-4, atol=1e-5)


def materialized(case: Case) -> None:
    """materialize keeps logits and experts, or refuses with the layer's name and changes nothing."""
    block, hidden = case.layer().eval(), case.hidden()
    model, router = nn.ModuleDict({"block": block}), block.router
    before = route(router, hidden)
    try:
        materialize(model)
    except ValueError as refusal:
        expect("block" in str(refusal), f"the refusal must name the layer, got {str(refusal)!r}")
        expect(router.spec == case.spec, f"refused, but the spec is {router.spec!r}")
        expect_equal(route(router, hidden).logits, before.logits, "refused, but the logits changed")
        return
    after = route(router, hidden)
    expect_close(after.logits, before.logits, "logits", atol=1e-6, rtol=1e-5)
    expect_equal(after.experts, before.experts, "experts")


def step(layer: MoE, hidden: Tensor, call: Callable[..., Tensor], **fields: object) -> dict[str, Tensor]:
    """What a training step on `call(hidden)` leaves, by name: output, gradients, losses and the router's buffers."""
    context = context_for(layer.router, hidden, **fields)
    hidden = hidden.clone().requires_grad_()
    torch.default_generator.manual_seed(3)
    with warnings.catch_warnings():  # the compiler's own
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        output = call(hidden, context)
    expect(output.shape == hidden.shape, f"{list(hidden.shape)} went in, {list(output.shape)} came out")
    loss = (hidden + output).square().sum() / max(1, output.numel())  # as behind a residual connection
    found = {f"the loss {name!r}": one.detach() for name, one in losses(layer)[""].items()}
    (add_losses(loss, layer) if layer.delivery.how == "collect" else loss).backward()  # type: ignore[no-untyped-call]
    step_end(layer)
    assert hidden.grad is not None
    found |= {"the output": output.detach(), "the input's gradient": hidden.grad}
    found |= {f"the gradient of {name}": one.grad for name, one in layer.named_parameters() if one.grad is not None}
    return found | {f"the buffer {name}": one for name, one in layer.router.named_buffers()}


def compiles_in_training(case: Case, backend: str = "aot_eager") -> None:
    """torch.compile makes one graph of a layer in training and changes no output, loss, gradient or state.

    Several graphs are allowed with a mixer, where the backward gathers statistics for `step_end`, and where weights
    multiply the experts' inputs.
    """
    graphs: list[Any] = []
    compile_graph = torch._dynamo.lookup_backend(backend)

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return compile_graph(graph, inputs)

    plain, other = case.layer(), case.layer()
    plain.router.balance = other.router.balance = plain.router.balance or 0.5
    routing = route(plain.router, case.hidden())
    whole = not routing.statistics and plain.router.mix is None and routing.combine.one_graph
    torch._dynamo.reset()
    wanted = step(plain, case.hidden(), plain)
    found = step(other, case.hidden(), torch.compile(other, backend=counting))
    expect_same(found, wanted, "compiled", rtol=1e-4, atol=1e-6)
    expect(not whole or len(graphs) == 1, f"{len(graphs)} graphs instead of one")


def trains_the_same_parameters(case: Case) -> None:
    """In float64 the same parameters get a gradient through a residual connection, eager and under torch.compile."""
    plain, other = (case.layer(attach_losses=True).double() for _ in range(2))
    plain.router.balance = other.router.balance = plain.router.balance or 0.5
    torch._dynamo.reset()
    wanted = step(plain, case.hidden().double(), plain)
    found = step(other, case.hidden().double(), torch.compile(other, backend="aot_eager"))
    expect_same(found, wanted, "compiled", rtol=1e-7, atol=1e-9)
