"""What a model costs: parameters by component, and inference FLOPs for every k, read from the model's own weights.

Models can be built on torch's meta device for this: no weight is drawn.

FLOPs follow the protocol that reproduces HyperRouter's Table A3: one evaluation batch of 10 sequences, 128 tokens
each after 896 of memory; two operations a multiply-accumulate; linear layers of attention (queries, keys and values of
memory and tokens, as the released code computes them), feed-forward layers, experts and routers. Products of queries
with keys, norms, mixing and the output layer are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pointsman.control import named_routers, undecayed
from pointsman.layer import MoE
from pointsman.routers.frame.registry import has_one_k
from pointsman.routers.frame.router import Router
from pointsman.routers.frame.stages import Scorer
from pointsman_lab.models.attention import Attention
from pointsman_lab.models.blocks import FeedForward
from pointsman_lab.models.config import ModelConfig, build_model
from pointsman_lab.models.transformer_xl import RelativeAttention


@dataclass(frozen=True)
class ParameterTable:
    """Numbers of parameters by component; shared ones count once, all outside routers train."""

    attention: int  # with the two biases that all layers share; without norms
    experts: int  # shared ones included
    feed_forward: int  # dense
    norms: int
    embeddings: int  # tied with the output, and the output's bias
    router_trainable: int
    router_fixed: int  # hypernetworks, frozen scorers
    other: int

    @property
    def backbone(self) -> int:
        """All that trains, routers not included."""
        return self.attention + self.experts + self.feed_forward + self.norms + self.embeddings + self.other

    @property
    def trainable(self) -> int:
        """All that trains, routers included."""
        return self.backbone + self.router_trainable


@dataclass(frozen=True)
class Protocol:
    """What is counted: `batch` sequences of `length` tokens after `memory` positions."""

    batch: int = 10
    length: int = 128
    memory: int = 896


PAPERS = Protocol()


@dataclass(frozen=True)
class CostRow:
    """One router's costs in one shape of model."""

    router: str
    parameters: ParameterTable
    fixed_a_layer: int  # in the router of one sparse layer: a hypernetwork's 1,122,576
    flops: dict[int, int]  # by k; a baseline has the k = N entry only


ROLES = {
    "attention": "attention",
    "experts": "experts",
    "shared-experts": "experts",
    "virtual-experts": "experts",
    "feed-forward": "feed_forward",
    "norm": "norms",
    "embedding": "embeddings",
    "router": "router_trainable",
}


def parameter_table(model: nn.Module) -> ParameterTable:
    """Parameters by component: each belongs to the innermost module around it that has a role in the table."""
    counts = dict.fromkeys(ParameterTable.__dataclass_fields__, 0)
    seen: set[int] = set()

    def count(module: nn.Module, component: str) -> None:
        component = ROLES.get(str(getattr(module, "role", "")), component)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                counts[component] += parameter.numel()
        for child in module.children():
            count(child, component)

    count(model, "other")
    fixed = {id(buffer): buffer.numel() for _, router in named_routers(model) for buffer in fixed_tensors(router)}
    counts["router_fixed"] = sum(fixed.values())
    return ParameterTable(**counts)


def fixed_tensors(router: Router) -> list[Tensor]:
    """What of a router's score never trains, apart from single numbers (tau, sigma)."""
    return [buffer for buffer in router.score.buffers() if buffer.dim() > 0]


def inference_flops(model: nn.Module, top_k: int, protocol: Protocol = PAPERS) -> int:
    """FLOPs of one batch with k experts a token, by this module's protocol."""
    tokens = protocol.batch * protocol.length
    keys = protocol.length + protocol.memory
    total = 0
    for module in model.modules():
        if isinstance(module, RelativeAttention):
            total += protocol.batch * keys * module.qkv.weight.numel() + keys * module.position.weight.numel()
            total += tokens * module.output.weight.numel()
        elif isinstance(module, Attention | FeedForward):
            total += tokens * _entries(module, 2)
        elif isinstance(module, MoE):
            rows, besides = module.router.select.cost(protocol.batch, tokens, top_k, module.router.dim)
            total += int(rows * (_entries(module.experts, 3) // module.experts.num_experts)) + besides
            total += tokens * (router_products(module.router) + _entries(module.shared, 2) + _entries(module.virtual))
    return 2 * total


def _entries(module: nn.Module | None, dim: int | None = None) -> int:
    """Numbers in a module's parameters, or in those of so many dimensions."""
    parameters = () if module is None else module.parameters()
    return sum(parameter.numel() for parameter in parameters if dim in (None, parameter.dim()))


def cost_a_token(config: ModelConfig, length: int, memory: int) -> dict[str, int]:
    """What a token costs at the first k of training: {"top_k", "flops" of inference by this module's protocol, "active"
    and "total" trainable parameters, routers included}, of texts of `length` after `memory` positions."""
    model, k = _built(config), config.num_experts if has_one_k(config.router) else config.top_k
    total = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layers = (module for module in model.modules() if isinstance(module, MoE))
    idle = sum((config.num_experts - min(k, layer.router.select.most)) * _entries(layer.experts) for layer in layers)
    flops = inference_flops(model, k, Protocol(1, length, memory)) // length
    return {"top_k": config.top_k, "flops": flops, "active": total - idle // config.num_experts, "total": total}


@torch.no_grad()
def router_products(router: Router) -> int:
    """Multiply-accumulates of one token's scores: what scorers say (`Scorer.cost`), and the entries of other matrices.

    A generated router costs what the linear one costs that it generates, once, before inference; a look-up nothing.
    """
    scorers = [part for part in router.score.modules() if isinstance(part, Scorer)]
    told: dict[Scorer, int] = {part: cost for part in scorers if (cost := part.cost()) is not None}
    if not told and (plain := router.score.plain_linear()) is not None:
        return plain[0].numel()
    generated = {part: make()[0] for part in router.score.modules() if (make := getattr(part, "generate", None))}
    apart = undecayed(router.score) | {id(buffer) for part in generated for buffer in part.buffers()}
    apart |= {id(one) for part in told for one in (*part.parameters(), *part.buffers())}
    tensors: list[Tensor] = [*router.score.parameters(), *router.score.buffers(), *generated.values()]
    counted = (one for one in tensors if one.dim() > 1 and one.is_floating_point() and id(one) not in apart)
    return sum(told.values()) + sum(one.numel() for one in counted)


def cost_row(config: ModelConfig, top_k: Iterable[int], protocol: Protocol = PAPERS) -> CostRow:
    """The costs of the model that `config` describes, for each k."""
    model = _built(config)
    ks = [config.num_experts] if has_one_k(config.router) else list(top_k)
    return CostRow(
        config.router,
        parameter_table(model),
        max((sum(map(Tensor.numel, fixed_tensors(router))) for _, router in named_routers(model)), default=0),
        {k: inference_flops(model, k, protocol) for k in ks},
    )


def cost_table(config: ModelConfig, specs: Sequence[str], protocol: Protocol = PAPERS) -> list[CostRow]:
    """The costs of one shape with each router, for k = 1, 2, 4 … and the number of experts."""
    ks = [*(2**power for power in range((config.num_experts - 1).bit_length())), config.num_experts]
    return [cost_row(replace(config, router=spec), ks, protocol) for spec in specs]


def _built(config: ModelConfig) -> nn.Module:
    """The model without weights; nothing is trained, so routers that look at later tokens are taken."""
    if hasattr(config, "allow_non_causal"):
        config = replace(config, allow_non_causal=True)  # type: ignore[call-arg]
    with torch.device("meta"):
        model: nn.Module = build_model(config)
    return model
