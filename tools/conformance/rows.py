"""The rows of the table: what each compares, as a function that gives (ours, the original's)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pointsman import MoE
from pointsman.routing import Routing
from tools.conformance.originals import (
    DIM,
    EXPERTS,
    TOKENS,
    Case,
    File,
    K,
    Row,
    beside,
    both,
    hidden_states,
    ours,
    routed,
    scattered,
)  # fmt: skip

MEGATRON = File(
    "NVIDIA/Megatron-LM", "d98e8a64ddf34856e74b24714e3bedb2f5a39553", "megatron/core/transformer/moe/moe_utils.py"
)
TUTEL = "microsoft/tutel", "82af7aad9fc3ec981395ba97e7242a480984a55e"
TUTEL_LOSSES, TUTEL_COSINE = File(*TUTEL, "tutel/impls/losses.py"), File(*TUTEL, "tutel/gates/cosine_top.py")
DENSEMIXER = File("yaof20/DenseMixer", "5fa4cfd923eb0309c78e83058a651bbf9838906d", "densemixer/models/olmoe_custom.py")
DYNMOE = File(
    "LINs-lab/DynMoE", "49272326e794b24bbebe3a9c6df3c079b3dd887b", "EMoE/tutel/tutel/gates/gated_multi_gate_t.py"
)


def megatron(spec: str, original: str, k: int = K, **options: Any) -> Row:
    """Megatron-core's routing of logits; with `capacity` its dropping, with `balance` its losses."""

    def compare(originals: Path | None) -> tuple[Case, Case]:
        names = ["topk_routing_with_score_function", "group_limited_topk", "apply_router_token_dropping"]
        names += ["get_capacity", "switch_load_balancing_loss_func", "z_loss_func"]
        given: dict[str, Any] = {"is_batch_invariant_mode_enabled": lambda: False, "HAVE_TE": False}
        space = MEGATRON.load(originals, names, **given)
        router, settings = ours(spec, k), dict(options)
        hidden, weight = beside(router, torch.randn_like(router.score.weight))
        if settings.pop("bias", False):
            router.select.bias.normal_(std=0.3)
            settings["expert_bias"] = router.select.bias
        capacity, balanced = settings.pop("capacity", None), settings.pop("balanced", False)
        logits = hidden[0] @ weight.T
        probs, chosen = space["topk_routing_with_score_function"](logits, k, **settings)
        losses = {}
        if balanced:
            loss = space["switch_load_balancing_loss_func"]
            losses["balance"] = loss(torch.softmax(logits, -1), chosen.sum(0), TOKENS, k, EXPERTS, 1.0)
            losses["z_loss"] = space["z_loss_func"](logits, 1.0)
        if capacity:
            probs, _ = space["apply_router_token_dropping"](probs, chosen, k, capacity, "probs")
        return both(router, hidden, weight, probs, losses)

    return Row(spec, original, MEGATRON.where, compare)


def megatron_sinkhorn(originals: Path | None) -> tuple[Case, Case]:
    plan = MEGATRON.load(originals, ["sinkhorn"])["sinkhorn"]
    router = ours("sinkhorn:iterations=2000", 1)
    hidden, weight = beside(router, 20 * router.score.weight)
    logits = hidden[0] @ weight.T
    with torch.no_grad():
        chosen = plan(logits, 1e-6).topk(1).indices
    weights = scattered(torch.sigmoid(logits).gather(1, chosen), chosen, EXPERTS)
    return both(router, hidden, weight, weights)


def megatron_quantile(originals: Path | None) -> tuple[Case, Case]:
    """The biases after a step stand in the place of weights."""
    update = MEGATRON.load(originals, ["qb_dual_update"])["qb_dual_update"]
    router = ours("loss-free:update=quantile:bins=0:centre=false")
    hidden, weight = beside(router, 20 * router.score.weight)
    scores = torch.sigmoid(hidden[0] @ weight.T).detach()
    routing: Routing = router.train()(hidden_states())
    router.gather(routing.statistics)
    router.step_end()
    _, beta = update(scores, K, torch.zeros(EXPERTS, dtype=torch.float64))
    return Case(-router.select.bias), Case(beta)


def tutel_loss(originals: Path | None) -> tuple[Case, Case]:
    space = TUTEL_LOSSES.load(originals, ["_one_hot_with_dtype", "gshard_loss"])
    router = ours("gshard:second=all:balance=1")
    hidden, weight = beside(router, router.score.weight)
    probs = torch.softmax(hidden[0] @ weight.T, -1)
    best, chosen = probs.topk(K)
    weights = scattered(best / best.sum(-1, keepdim=True), chosen, EXPERTS)
    return both(router, hidden, weight, weights, {"balance": space["gshard_loss"](probs, chosen)})


def tutel_cosine(originals: Path | None) -> tuple[Case, Case]:
    theirs = TUTEL_COSINE.load(originals, ["CosineTopKGate"])["CosineTopKGate"]
    router = ours("xmoe:balance=0:renormalize=true")
    score: Any = router.score
    built = theirs(DIM, EXPERTS, K, proj_dim=score.projection.weight.shape[0]).double()
    with torch.no_grad():
        built.sim_matrix.normal_()
        built.cosine_projector.bias.zero_()
        score.projection.weight.copy_(built.cosine_projector.weight)
        score.expert_embeddings.copy_(built.sim_matrix.T)
        router.normalize.temperature.fill_(float(torch.exp(-built.temperature)))
    hidden = hidden_states().requires_grad_()
    best, chosen = torch.softmax(built(hidden[0]), -1).topk(K)
    leaves = {"hidden": hidden, "projection": built.cosine_projector.weight}
    other = Case(scattered(best / best.sum(-1, keepdim=True), chosen, EXPERTS), {}, leaves)
    return routed(router, {"projection": score.projection.weight}), other


def dynmoe(training: bool) -> Callable[[Path | None], tuple[Case, Case]]:
    def compare(originals: Path | None) -> tuple[Case, Case]:
        """The chosen experts with weight 1 each; gradients are not compared."""
        quiet: dict[str, Any] = {"print": lambda *_: None}
        theirs = DYNMOE.load(originals, ["GAMoEGateBackward", "GAMoEGateT"], **quiet)["GAMoEGateT"]
        built = theirs(DIM, EXPERTS, max_expert_num=EXPERTS).double().train(training)
        router = ours("dynmoe", EXPERTS).train(training)
        with torch.no_grad():
            built.sim_matrix.normal_()
            built.gates.normal_(std=0.1)
            router.score.weight.copy_(built.sim_matrix.T)
            router.score.threshold.copy_(built.gates)
            scores, _ = built(hidden_states()[0])
            routing: Routing = router(hidden_states())
        found = (routing.dense_weights > 0).double()
        if not training:  # a token below all thresholds keeps the scores of all, of which the largest is taken
            whole = scores < 1
            best = scattered(torch.ones(TOKENS, 1, dtype=torch.float64), scores.argmax(1, keepdim=True), EXPERTS)
            scores = torch.where(whole.all(1, keepdim=True), best, (scores >= 1).double())
        return Case(found), Case((scores > 0).double())

    return compare


def dense_mixer(originals: Path | None) -> tuple[Case, Case]:
    """The layer's outputs stand in the place of weights."""
    space = DENSEMIXER.load(originals, ["CustomOlmoeSparseMoeBlock"], log_custom_forward_usage=lambda name: None)
    torch.manual_seed(0)
    layer = MoE(DIM, 8, EXPERTS, router="smoe:bias=false:dense_gradient=true", bias=False).double()
    mine = {"weight": layer.router.score.weight, "w_in": layer.experts.w_in, "w_out": layer.experts.w_out}
    theirs = {name: tensor.detach().clone().requires_grad_() for name, tensor in mine.items()}  # type: ignore[operator]

    def expert(place: int) -> Callable[[Tensor], Tensor]:
        return lambda rows: torch.relu(rows @ theirs["w_in"][place].T) @ theirs["w_out"][place].T

    block = SimpleNamespace(
        gate=lambda rows: rows @ theirs["weight"].T, top_k=K, norm_topk_prob=True, num_experts=EXPERTS,
        experts=[expert(place) for place in range(EXPERTS)],
    )  # fmt: skip
    hidden, other = hidden_states().requires_grad_(), hidden_states().requires_grad_()
    output, _ = space["CustomOlmoeSparseMoeBlock"].forward(block, other)
    return Case(layer(hidden), {}, {"hidden": hidden, **mine}), Case(output, {}, {"hidden": other, **theirs})  # type: ignore[dict-item]


DEEPSEEK = "loss-free:groups=4:kept=2:scale=2.5"
ROWS: tuple[Row, ...] = (
    megatron("smoe:bias=false:balance=1:z_loss=1", "topk_routing…, switch and z losses", balanced=True),
    megatron("smoe:bias=false:renormalize=false", "topk_routing…, pre-softmax", use_pre_softmax=True),
    megatron(DEEPSEEK, "topk_routing…, sigmoid, bias and groups", 4, score_function="sigmoid", bias=True, num_groups=4,
             group_topk=2, scaling_factor=2.5),
    megatron("smoe:bias=false:renormalize=false:capacity=0.75:capacity_order=probs:capacity_scope=batch",
             "apply_router_token_dropping, probs", use_pre_softmax=True, capacity=0.75),
    Row("sinkhorn:iterations=2000", "sinkhorn, top-1", MEGATRON.where, megatron_sinkhorn),
    Row("loss-free:update=quantile:bins=0:centre=false", "qb_dual_update (the biases)", MEGATRON.where,
        megatron_quantile),
    Row("gshard:second=all:balance=1", "gshard_loss", TUTEL_LOSSES.where, tutel_loss),
    Row("xmoe:renormalize=true", "CosineTopKGate", TUTEL_COSINE.where, tutel_cosine),
    Row("smoe:bias=false:dense_gradient=true", "CustomOlmoeSparseMoeBlock (the layer's output)", DENSEMIXER.where,
        dense_mixer),
    Row("dynmoe", "GAMoEGateT, training (the choice)", DYNMOE.where, dynmoe(True)),
    Row("dynmoe", "GAMoEGateT, evaluation (the choice)", DYNMOE.where, dynmoe(False)),
)  # fmt: skip

NONE: Mapping[str, str] = {
    "smoe+similarity, smoe+attention": "no code was published",
    "base, expert-choice, soft, vmoe": "originals in fairseq, Flax and JAX, which are no dependencies here",
    "all others": "their originals, where public, are parts of training programs that do not run alone; of each router "
    "`tests/library/routers` has a transcription of the paper's equations in float64, forward and gradient",
}
"""Routers without a row, and why."""
