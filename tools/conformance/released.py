"""Rows against gates that authors of a router, or of a training library, released, and that run without a trainer."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pointsman import RoutingContext
from pointsman.routing import Routing
from tools.conformance.originals import (
    DIM,
    EXPERTS,
    TOKENS,
    TORCH,
    Case,
    File,
    K,
    Row,
    beside,
    both,
    hidden_states,
    of_transformers,
    ours,
    scattered,
)

HYPERROUTER = File("giangdip2410/HyperRouter", "13a7d3c4524cf712a0534edcd18a77f6b45a120b", "custom_gate.py")
TORCHSCALE = File(
    "microsoft/torchscale", "4d1e0e82e5adf86dd424f1463192635b73fc8efc", "torchscale/component/xmoe/routing.py"
)
DEEPSPEED = File("microsoft/DeepSpeed", "38327e07f6cd39b63418f60cedd1651b0be3e7c3", "deepspeed/moe/sharded_moe.py")
MOEPP = File("SkyworkAI/MoE-plus-plus", "7f439675dd015fa307a31443544f76fa3525ba92", "MoE++/moe_plus_plus_layer.py")
RMOE = File("qiuzh20/RMoE", "9913a7f712f8c706a57d252d7649cd9d97f53aef", "llama_moe_rnn/rnn.py")
ADAMOE = File(
    "CengZihao/AdaMoE", "180f1227fbb31878ae429776566a15fd7497e904",
    "exp_2/LLaMA_Factory/src/llamafactory/model/adaptive_moe_utils.py",
)  # fmt: skip
TOP_P = File("ZhenweiAn/Dynamic_MoE", "f56bc20db176f22ab51cb56b7dcb96403fb2cd8a", "modeling/modeling_moe.py")
REMOE = "thu-ml/ReMoE", "463c6af38ffaa841941ea834470ee09f8d515652"
REMOE_ROUTER = File(*REMOE, "megatron/core/transformer/moe/router.py")
REMOE_LOSS = File(*REMOE, "megatron/core/transformer/moe/moe_utils.py")
WIDTH = 6  # of a state over the layers
ZAYA = f"recurrent:depth=average:width={WIDTH}@loss-free:nulls=1:null_bias=-1:renormalize=false"


def above(router: Any, below: Tensor | None, leaves: dict[str, Tensor]) -> Case:
    """Our router's case, in a layer that is given `below` by the one under it."""
    hidden = hidden_states().requires_grad_()
    states = {} if below is None else dict.fromkeys(router.score.below, below[None])
    routing: Routing = router(hidden, RoutingContext(below=states))
    leaves = {"hidden": hidden, **leaves} | ({} if below is None else {"below": below})
    return Case(routing.dense_weights, routing.losses, leaves)


def state(columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(TOKENS, columns, dtype=torch.float64, generator=generator).requires_grad_()


def hyperrouter(originals: Path | None) -> tuple[Case, Case]:
    theirs = HYPERROUTER.load(originals, ["HyperRouterGate"], BaseGate=nn.Module)["HyperRouterGate"]
    router = ours("hyperrouter")
    hypernet = nn.Sequential(nn.Linear(DIM, 256), nn.ReLU(), nn.Linear(256, EXPERTS * (DIM + 1))).double()
    hypernet.load_state_dict(router.score.hypernetwork.state_dict())
    embedding = router.score.embedding.detach().clone().requires_grad_()
    block = SimpleNamespace(embedding=embedding[None], hypernet=hypernet, tot_expert=EXPERTS, top_k=K)
    block.gate, block.dense_moe_flag = nn.Linear(DIM, EXPERTS), False
    hidden = hidden_states().requires_grad_()
    chosen, weights = theirs.forward(block, hidden[0])
    other = Case(scattered(weights, chosen, EXPERTS), {}, {"hidden": hidden, "embedding": embedding})
    return above(router, None, {"embedding": router.score.embedding}), other


def zaya(originals: Path | None) -> tuple[Case, Case]:
    """The second layer: the state of the first is given."""
    torch.manual_seed(0)
    sizes = {"hidden_size": DIM, "num_experts": EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": WIDTH}
    theirs = of_transformers("zaya", "ZayaRouter", 1, **sizes)
    router = ours(ZAYA, 1)
    score, mlp = router.score, theirs.router_mlp
    pairs = {score.into: theirs.down_proj, score.hidden[0]: mlp.fc1, score.hidden[1]: mlp.fc2, score.out: mlp.out_proj}
    for mine, other in pairs.items():
        mine.load_state_dict(other.state_dict())
    with torch.no_grad():
        score.gamma.copy_(theirs.router_states_scale)
        score.norm.copy_(mlp.norm.weight)
        router.select.bias.copy_(theirs.balancing_biases)
    hidden, below = hidden_states().requires_grad_(), state(WIDTH)
    _, weights, chosen, _ = theirs(hidden, below[None])
    leaves = {"hidden": hidden, "below": below, "gamma": theirs.router_states_scale, "into": theirs.down_proj.weight}
    mine = above(router, state(WIDTH), {"gamma": score.gamma, "into": score.into.weight})
    return mine, Case(scattered(weights, chosen, EXPERTS + 1), {}, leaves)


class _Histograms(type(TORCH)):  # type: ignore[misc]
    """torch, whose histograms on a CPU do not count whole numbers."""

    @staticmethod
    def histc(values: Tensor, **options: Any) -> Tensor:
        return torch.histc(values.double(), **options)


def torchscale(originals: Path | None) -> tuple[Case, Case]:
    names = ["Top2Gate", "top2gating", "one_hot", "entropy"]
    given = {"has_tutel": False, "SAMPLE_FRACTION": 0.2, "fused_cumsum_sub_one": lambda mask: mask.cumsum(0) - 1}
    space = TORCHSCALE.load(originals, names, torch=_Histograms(), **given)
    torch.manual_seed(0)
    built = space["Top2Gate"](DIM, EXPERTS, False, "all", moe_eval_capacity_token_fraction=1.0, use_xmoe=True)
    built.double().eval()
    router = ours("xmoe-torchscale:balance=0")
    with torch.no_grad():
        router.score.projection.weight.copy_(built.wg_reduction.weight)
        router.score.expert_embeddings.copy_(built.wg)
    router.step_end()  # they restore the norms in each forward
    hidden = hidden_states().requires_grad_()
    _, weights, _, _ = built(hidden[0])
    other = Case(weights.sum(2), {}, {"hidden": hidden, "experts": built.wg, "projection": built.wg_reduction.weight})
    leaves = {"experts": router.score.expert_embeddings, "projection": router.score.projection.weight}
    return above(router, None, leaves), other


def deepspeed(spec: str, name: str, *arguments: Any) -> Row:
    """One of DeepSpeed's functions of logits; 0.75 is its capacity factor."""

    spec += ":balance=1:capacity=0.75:capacity_scope=batch:capacity_total=one"

    def compare(originals: Path | None) -> tuple[Case, Case]:
        names = [name, "_capacity", "_one_hot_to_float", "einsum"]
        function = DEEPSPEED.load(originals, names, USE_EINSUM=True)[name]
        router = ours(spec)
        hidden, weight = beside(router, 20 * router.score.weight)
        loss, weights, _, _ = function(hidden[0] @ weight.T, *arguments)
        return both(router, hidden, weight, weights.sum(2), {"balance": loss})

    return Row(spec, name, DEEPSPEED.where, compare)


def moepp(originals: Path | None) -> tuple[Case, Case]:
    """Four virtual experts, which come last there as well, but in another order."""
    columns = EXPERTS + 4
    place = torch.tensor([*range(EXPERTS), columns - 1, columns - 2, EXPERTS, EXPERTS + 1])
    given: dict[str, Any] = {"Module": nn.Module, "MOE_TOP_K": K, "defaultdict": defaultdict}
    torch.manual_seed(0)
    built = MOEPP.load(originals, ["gating", "Router"], **given)["Router"](DIM, columns, False, False, False, 1.0)
    built.double()
    router = ours("smoe:residual=true:bias=false@smoe:nulls=4:kind=mixed")
    with torch.no_grad():
        router.score.weight.copy_(built.wg.weight[place])
        router.score.residual.copy_(built.gate_map.weight[place][:, place])
    hidden, below = hidden_states().requires_grad_(), state(columns)
    found, _ = built(hidden[0], below[:, place.argsort()])
    weights = torch.zeros(TOKENS, columns, dtype=torch.float64)
    for expert, (tokens, values) in found.items():
        weights = weights.index_put((tokens, torch.full_like(tokens, expert)), values)
    other = Case(weights[:, place], {}, {"hidden": hidden, "below": below})
    return above(router, state(columns), {}), other


def adamoe(originals: Path | None) -> tuple[Case, Case]:
    """Each expert's output is a unit vector, so that the layer's output is the weights."""
    block = ADAMOE.load(originals, ["CustomMixtralSparseMoeBlock"])["CustomMixtralSparseMoeBlock"]
    router = ours("smoe:nulls=4:bias=false")
    hidden, weight = beside(router, router.score.weight)
    sizes = {"num_experts": EXPERTS, "num_null_experts": 4, "top_k": K, "training": False}
    real, null = (lambda rows: rows @ weight[:EXPERTS].T), (lambda rows: rows @ weight[EXPERTS:].T)
    units = torch.eye(DIM, dtype=torch.float64)
    experts = [lambda rows, place=place: units[place].expand_as(rows) for place in range(EXPERTS)]
    output, _ = block.forward(SimpleNamespace(gate=real, gate2=null, experts=experts, **sizes), hidden)
    return both(router, hidden, weight, output[0, :, : EXPERTS + 4])


def top_p(originals: Path | None) -> tuple[Case, Case]:
    name = "top_p_sampling_batched_all_sequence"
    router = ours("top-p:balance=0:dynamic=0", EXPERTS)
    hidden, weight = beside(router, 20 * router.score.weight)
    weights, chosen = TOP_P.load(originals, [name])[name](torch.softmax(hidden @ weight.T, -1), 0.4)
    kept = scattered(torch.where(chosen[0] < 0, 0, weights[0]), chosen[0].clamp_min(0), EXPERTS)
    return both(router, hidden, weight, kept)


def rmoe(originals: Path | None) -> tuple[Case, Case]:
    """The second layer: the state of the first is given."""
    theirs = RMOE.load(originals, ["CustomGRUCell"])["CustomGRUCell"]
    router = ours(f"recurrent:width={WIDTH}")
    score = router.score
    cell = SimpleNamespace(hidden_size=WIDTH)
    for side, mine in (("i", score.cell.given), ("h", score.cell.state)):
        for gate, weight, bias in zip("rzn", mine.weight.detach().chunk(3), mine.bias.detach().chunk(3), strict=True):
            setattr(cell, f"weight_{side}{gate}", weight)
            setattr(cell, f"bias_{side}{gate}", bias)
    hidden, below = hidden_states().requires_grad_(), state(WIDTH)
    after = theirs.forward(cell, hidden[0] @ score.into.weight.detach().T, below)
    best, chosen = torch.softmax(after @ score.out.weight.detach().T, -1).topk(K)
    weights = scattered(best / best.sum(-1, keepdim=True), chosen, EXPERTS)
    return above(router, state(WIDTH), {}), Case(weights, {}, {"hidden": hidden, "below": below})


def remoe(originals: Path | None) -> tuple[Case, Case]:
    """With lambda = 1."""
    gates = REMOE_ROUTER.load(originals, ["ReLURouter"], Router=nn.Module)["ReLURouter"]
    loss = REMOE_LOSS.load(originals, ["switch_load_balancing_loss_func"])["switch_load_balancing_loss_func"]
    router = ours("relu")
    router.select.penalty.fill_(1)
    hidden, weight = beside(router, 20 * router.score.weight)
    weights, members = gates.l1_reg_load_balancing(SimpleNamespace(training=False), hidden[0] @ weight.T)
    return both(router, hidden, weight, weights, {"sparsity": loss(weights, members.sum(0), K, 1.0)})


RELEASED: tuple[Row, ...] = (
    Row(ZAYA, "ZayaRouter, second layer", "transformers", zaya),
    Row("hyperrouter", "HyperRouterGate", HYPERROUTER.where, hyperrouter),
    Row("xmoe-torchscale", "Top2Gate, use_xmoe", TORCHSCALE.where, torchscale),
    deepspeed("gshard:second=all:capacity_order=rank", "top2gating", 0.75, 1, True, None, False),
    deepspeed("smoe:bias=false", "topkgating", K, 0.75, 1, True, None, "position"),
    Row("smoe:residual=true:bias=false@smoe:nulls=4:kind=mixed", "Router and gating, second layer", MOEPP.where, moepp),
    Row("smoe:nulls=4:bias=false", "CustomMixtralSparseMoeBlock (the weights)", ADAMOE.where, adamoe),
    Row("top-p", "top_p_sampling_batched_all_sequence", TOP_P.where, top_p),
    Row(f"recurrent:width={WIDTH}", "CustomGRUCell, second layer", RMOE.where, rmoe),
    Row("relu", "ReLURouter, its loss at lambda 1", REMOE_ROUTER.where, remoe),
)
