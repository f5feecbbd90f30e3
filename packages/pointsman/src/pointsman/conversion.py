"""upcycle: MoE layers whose experts are copies of a dense model's feed-forward layers (Komatsuzaki et al. 2023)."""

import copy
from collections.abc import Iterable
from contextlib import suppress
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from pointsman._values import check_whole
from pointsman.experts.combine import Dense
from pointsman.layer import MoE
from pointsman.ops.feed_forward import ACTIVATIONS
from pointsman.routers.frame.registry import build_router
from pointsman.routing import Combine

Roles = dict[str, nn.Linear]


def upcycle(
    mlps: Iterable[nn.Module], num_experts: int, router: str = "smoe", *, top_k: int = 2, noise: float = 0.0
) -> list[MoE]:
    """One `MoE` for each feed-forward layer of a dense model of your own, with the same output at the start.

        for block, moe in zip(model.blocks, pointsman.upcycle([block.mlp for block in model.blocks], 8, "xmoe")):
            block.mlp = moe

    A feed-forward layer is W_out act(W_in x), or gated W_out (act(W_gate x) * W_in x), of `nn.Linear`, with act ReLU,
    GELU or SiLU, whatever its modules are called: which linear layer and activation are which is found by computing its
    output in float64. Every expert is a copy, and the weights of a token's experts sum to 1, so that the output is the
    dense layer's for any k, up to rounding. The dense layers are not changed; their dropout is the experts'.

    Args:
        mlps: modules that map [..., dim] to [..., dim].
        num_experts: E.
        router: a router spec, with the router's own initial values.
        top_k: experts per token.
        noise: standard deviation of Gaussian noise on the experts' weights, relative to that of each matrix. It lets
            experts diverge; with noise the outputs are close to the dense layer's, not equal.

    Returns:
        the layers, each in the mode and dtype and on the device of its dense layer.

    Raises:
        ValueError: a module is no such layer, or the router's weights do not sum to 1.
    """
    check_whole("upcycle: num_experts", num_experts)
    if not 0 <= noise < float("inf"):
        raise ValueError(f"upcycle: noise={noise!r}: allowed are numbers from 0")
    check_weights(router, num_experts, top_k)
    return [_moe(mlp, f"module {place}", num_experts, router, top_k, noise) for place, mlp in enumerate(mlps)]


def check_weights(router: str, num_experts: int, top_k: int) -> None:
    """ValueError if a router weighs a token's experts otherwise than to 1 at any k. A mixer does not change that."""
    plain = build_router(router.partition("+")[0], dim=8, num_experts=num_experts, top_k=top_k, vocab_size=2).eval()
    if plain.needs or plain.score.may_need_responses:
        raise ValueError(f"upcycle: router {router!r} reads more than hidden states; build MoE with it yourself")
    for k in {top_k} if plain.fixed_k else {1, min(2, num_experts), top_k}:  # softmax alone sums to 1 at k = E
        plain.top_k = k
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            routing = plain(torch.randn(1, 16, 8))
        total = routing.weights.sum(-1)
        if not torch.allclose(total, torch.ones_like(total), atol=1e-5):
            raise ValueError(f"upcycle: the combine weights of {router!r} do not sum to 1 at k={k}, so the mixture "
                             "would not equal the dense model")  # fmt: skip
    if plain.limit is not None or type(routing.combine) not in (Combine, Dense):
        raise ValueError(f"upcycle: router {router!r} does not only weigh outputs; build MoE with it yourself")


def _moe(mlp: nn.Module, place: str, num_experts: int, router: str, top_k: int, noise: float) -> MoE:
    roles, activation = _read(mlp, place)
    out, first = roles["w_out"], roles["w_in"]
    chances = {module.p for module in mlp.modules() if isinstance(module, nn.Dropout)} - {0.0}
    if len(chances) > 1:
        raise ValueError(f"upcycle: {place}: dropout of {sorted(chances)}: experts have one")
    layer = MoE(
        out.out_features, out.in_features, num_experts, top_k=top_k, router=router, activation=activation,  # type: ignore[arg-type]
        gated="w_gate" in roles, bias=any(one.bias is not None for one in roles.values()),
        dropout=chances.pop() if chances else 0.0,
    ).to(first.weight.dtype)  # fmt: skip
    with torch.no_grad():
        for name, linear in roles.items():
            getattr(layer.experts, name).copy_(copies(linear.weight.cpu(), num_experts, noise))
            bias = getattr(layer.experts, name.replace("w_", "b_"))
            if bias is not None:
                bias.copy_(torch.zeros_like(bias) if linear.bias is None else linear.bias.cpu().expand_as(bias))
    return layer.to(first.weight.device, first.weight.dtype).train(mlp.training)


def copies(weight: Tensor, num_experts: int, noise: float) -> Tensor:
    """[E, ...]: the weight E times, each with noise of its own."""
    found = weight.expand(num_experts, *weight.shape)
    if not noise:
        return found
    return found + torch.randn(found.shape, device=weight.device, dtype=weight.dtype) * (noise * weight.std())


@torch.no_grad()
def _read(mlp: nn.Module, place: str) -> tuple[Roles, str]:
    """Which linear layer is which, and the activation: those that give the module's output on random inputs."""
    linears = [module for module in mlp.modules() if isinstance(module, nn.Linear)]
    named = f"upcycle: {place}, {type(mlp).__name__}"
    own = {id(one) for linear in linears for one in linear.parameters()}
    if len(linears) not in (2, 3) or any(id(one) not in own for one in mlp.parameters()):
        raise ValueError(f"{named}: allowed are modules of two or three nn.Linear and no other parameters")
    probe: Any = copy.deepcopy(mlp).double().cpu().eval()
    parts = [module for module in probe.modules() if isinstance(module, nn.Linear)]
    states = {}
    generator = torch.Generator().manual_seed(0)
    for part in parts:  # weights that are 0 tell no activation from another
        part.weight.uniform_(-1, 1, generator=generator)
    for width in sorted({one.in_features for one in parts}):
        hidden = torch.randn(16, width, dtype=torch.float64, generator=generator)
        with suppress(Exception):  # it takes another width
            states[width] = hidden, probe(hidden).double().view_as(hidden)
    names = ("w_in", "w_out") if len(parts) == 2 else ("w_in", "w_gate", "w_out")
    for places in permutations(range(len(parts))):
        order = dict(zip(names, (parts[one] for one in places), strict=True))
        shapes = {order[name].weight.shape for name in names[:-1]}
        if shapes != {order["w_out"].weight.T.shape} or order["w_in"].in_features not in states:
            continue
        hidden, wanted = states[order["w_in"].in_features]
        for activation, function in ACTIVATIONS.items():
            units = order["w_in"](hidden)
            units = function(order["w_gate"](hidden)) * units if "w_gate" in order else function(units)
            if torch.allclose(order["w_out"](units), wanted, rtol=1e-9, atol=1e-12):
                return dict(zip(names, (linears[one] for one in places), strict=True)), activation
    raise ValueError(f"{named}: no activation of {', '.join(ACTIVATIONS)} gives its output, gated or not")
