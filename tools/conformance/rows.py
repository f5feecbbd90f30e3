"""The rows of the table: what each compares, as a function that gives (ours, the original's)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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
    VOCABULARY,
    Case,
    File,
    K,
    Row,
    beside,
    both,
    function_of_transformers,
    hidden_states,
    ids,
    of_transformers,
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


Returned = tuple[Any, ...]


def gate(
    spec: str, model_type: str, name: str, *, k: int = K, weight: str = "weight", training: bool = True,
    arguments: Callable[[Any], Returned] = lambda module: (), result: Callable[[Returned], Tensor] | None = None,
    losses: Callable[[Returned], Mapping[str, Tensor]] = lambda returned: {}, **settings: Any,
) -> Row:  # fmt: skip
    """A gate of transformers. It returns its logits, weights and experts, or what `result` takes the weights from."""

    def compare(originals: Path | None) -> tuple[Case, Case]:
        torch.manual_seed(0)
        theirs = of_transformers(model_type, name, **SIZES, num_experts_per_tok=k, moe_topk=k, **settings)
        router = ours(spec, k)
        score: Any = router.score
        if "tid2eid" in dict(theirs.named_buffers()):
            theirs.tid2eid.copy_(torch.rand(VOCABULARY, EXPERTS).topk(k).indices)
            score.set_table(theirs.tid2eid)
            score = score.gate
        copied, scorer = theirs.get_parameter(weight), score.weight
        leaves = [("weight", copied, scorer)]
        bias = getattr(theirs.get_submodule(weight.rpartition(".")[0]), "bias", None)
        if bias is not None:
            leaves.append(("bias", bias, score.bias))
        with torch.no_grad():
            for _, one, other in leaves:
                other.copy_(one)
        for found in (*theirs.named_buffers(), *theirs.named_parameters()):
            if "correction_bias" in found[0]:
                router.select.bias.copy_(found[1].detach().flatten())
        if name in WITH_BIAS:
            router.select.bias.normal_()
        hidden = hidden_states().requires_grad_()
        given = WITH_BIAS.get(name, lambda router: ())(router)
        flat = hidden if name in FOLDED else hidden[0]
        found = theirs.train(training)(flat, *given, *arguments(theirs))
        weights = result(found) if result else scattered(found[1], found[2], EXPERTS + len(router.virtual))
        other = Case(weights, losses(found), {"hidden": hidden, **{n: a for n, a, _ in leaves}})
        return routed(router, {n: b for n, _, b in leaves}, training), other

    return Row(spec, name + (" and its losses" if "balance=1" in spec else ""), "transformers", compare)


SIZES: dict[str, Any] = {
    "hidden_size": DIM, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS,
    "vocab_size": VOCABULARY,
}  # fmt: skip
FOLDED = ("AfmoeTokenChoiceRouter", "SwitchTransformersTop1Router")  # take [B, T, dim]
WITH_BIAS: Mapping[str, Callable[[Any], tuple[Any, ...]]] = {
    "AfmoeTokenChoiceRouter": lambda router: (router.select.bias,),
    "Lfm2MoeTopKRouter": lambda router: (router.select.bias,),
}


def switch_losses(returned: Returned) -> Mapping[str, Tensor]:
    chosen, _, logits = returned
    balance = function_of_transformers("switch_transformers", "load_balancing_loss_func")
    z_loss = function_of_transformers("switch_transformers", "router_z_loss_func")
    return {"balance": balance(torch.softmax(logits, -1), chosen.argmax(-1)), "z_loss": z_loss(logits)}


def mixtral_loss(originals: Path | None) -> tuple[Case, Case]:
    router = ours(f"smoe:bias=false:balance={K}")
    hidden, weight = beside(router, router.score.weight)
    loss = function_of_transformers("mixtral", "load_balancing_loss_func")((hidden[0] @ weight.T,), EXPERTS, K)
    mine, other = both(router, hidden, weight, torch.zeros(()), {"balance": loss})
    return replace(mine, weights=other.weights), other


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


GROUPED: dict[str, Any] = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
DEEPSEEK = "loss-free:groups=4:kept=2:scale=2.5"
ROWS: tuple[Row, ...] = (
    gate("smoe:bias=false", "mixtral", "MixtralTopKRouter"),
    Row(f"smoe:bias=false:balance={K}", "load_balancing_loss_func (Mixtral)", "transformers", mixtral_loss),
    gate("smoe:bias=false:renormalize=false", "olmoe", "OlmoeTopKRouter", norm_topk_prob=False),
    gate("smoe:bias=false", "qwen3_moe", "Qwen3MoeTopKRouter", norm_topk_prob=True),
    gate("smoe:bias=false:renormalize=false", "qwen2_moe", "Qwen2MoeTopKRouter", norm_topk_prob=False),
    gate("smoe:bias=false:renormalize=false", "jamba", "JambaTopKRouter"),
    gate("smoe:bias=false", "granitemoe", "GraniteMoeTopKRouter"),
    gate("smoe:bias=false", "minimax", "MiniMaxTopKRouter"),
    gate("smoe", "gpt_oss", "GptOssTopKRouter"),
    gate("smoe:bias=false", "hunyuan_v1_moe", "HunYuanMoEV1Gate", weight="wg.weight"),
    gate("smoe:gate=sigmoid:bias=false:renormalize=false", "llama4_text", "Llama4Router", result=lambda one: one[0]),
    gate(
        "switch:bias=false:balance=1:z_loss=1", "switch_transformers", "SwitchTransformersTop1Router", k=1,
        weight="classifier.weight", result=lambda found: (found[0] * found[1])[0], losses=switch_losses,
        expert_capacity=TOKENS, router_jitter_noise=0.0,
    ),
    gate(
        "gshard:second=all:balance=0", "nllb-moe", "NllbMoeTop2Router", weight="classifier.weight",
        result=lambda found: found[1], expert_capacity=TOKENS, second_expert_policy="all",
        normalize_router_prob_before_dropping=True, batch_prioritized_routing=False, router_bias=False,
        router_dtype="float32", moe_eval_capacity_token_fraction=1.0,
    ),
    gate(
        "loss-free:gate=softmax:groups=4:kept=2:group_score=max:renormalize=false:scale=2.5", "deepseek_v2",
        "DeepseekV2TopkRouter", topk_method="group_limited_greedy", **GROUPED,
    ),
    gate(DEEPSEEK, "deepseek_v3", "DeepseekV3TopkRouter", **GROUPED),
    gate(DEEPSEEK, "glm4_moe", "Glm4MoeTopkRouter", **GROUPED),
    gate(DEEPSEEK, "bailing_hybrid", "BailingHybridTopkRouter", **GROUPED),
    gate(DEEPSEEK, "dots1", "Dots1TopkRouter", **GROUPED),
    gate(DEEPSEEK, "solar_open", "SolarOpenTopkRouter", **GROUPED),
    gate(
        "loss-free:gate=sqrtsoftplus:scale=1.5", "deepseek_v4", "DeepseekV4TopKRouter", scoring_func="sqrtsoftplus",
        routed_scaling_factor=1.5,
    ),
    gate(
        "hash:columns=2:gate=sqrtsoftplus:scale=1.5", "deepseek_v4", "DeepseekV4HashRouter",
        scoring_func="sqrtsoftplus", routed_scaling_factor=1.5, arguments=lambda module: (ids(),),
    ),
    gate("loss-free:gate=softmax", "ernie4_5_moe", "Ernie4_5_MoeTopKRouter", moe_norm_min=1e-12),
    gate("loss-free:scale=2", "afmoe", "AfmoeTokenChoiceRouter", weight="gate.weight", route_scale=2.0),
    gate(
        "loss-free", "lfm2_moe", "Lfm2MoeTopKRouter", norm_topk_prob=True, routed_scaling_factor=1.0,
        use_expert_bias=True,
    ),
    gate(
        "loss-free:gate=softmax:nulls=4:kind=copy:renormalize=false:scale=6", "longcat_flash",
        "LongcatFlashTopkRouter", weight="classifier.weight", zero_expert_num=4, routed_scaling_factor=6.0,
        router_bias=False,
    ),
    gate(
        "sparsemixer:bias=false:r=0.01", "phimoe", "PhimoeTopKRouter", training=False, router_jitter_noise=0.01,
        input_jitter_noise=0.0,
    ),
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
