"""Each engine's MoE layer with a router of ours, small, on a CPU; its experts' weights in the layout of our layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

DIM, HIDDEN, EXPERTS = 16, 24, 4


@dataclass
class Built:
    """A layer of an engine.

    Attributes:
        layer: the engine's module.
        router: ours in it; None: the engine's own.
        run: [B, T, dim] -> [B, T, dim].
        experts: our names -> the engine's values of one layer of experts.
        own: the weight [E, dim] of the engine's own router.
    """

    layer: nn.Module
    router: Any
    run: Callable[[Tensor], Tensor]
    experts: Callable[[], dict[str, Tensor]]
    own: Callable[[], Tensor]


def megatron(spec: str | None, k: int = 2, **settings: Any) -> Built:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from pointsman.engines.megatron import router

    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=DIM, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=k,
        ffn_hidden_size=HIDDEN, moe_ffn_hidden_size=HIDDEN, add_bias_linear=False,
        gated_linear_unit=True, activation_func=F.silu, use_cpu_initialization=True, bias_activation_fusion=False,
        **{"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none",
           "moe_router_pre_softmax": k == 1, **settings},
    )  # fmt: skip
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = ModuleSpec(module=SequentialMLP, submodules=linear)
    layer = MoELayer(
        config, MoESubmodules(experts, **({} if spec is None else {"router": router(spec)})), layer_number=1
    )

    def weights() -> dict[str, Tensor]:
        up = torch.stack([one.linear_fc1.weight.detach() for one in layer.experts.local_experts])
        down = torch.stack([one.linear_fc2.weight.detach() for one in layer.experts.local_experts])
        return {"w_gate": up[:, :HIDDEN], "w_in": up[:, HIDDEN:], "w_out": down}

    def run(hidden: Tensor) -> Tensor:
        found: Tensor = layer(hidden.transpose(0, 1).contiguous())[0]
        return found.transpose(0, 1)

    return Built(layer, getattr(layer.router, "router", None), run, weights, lambda: layer.router.weight)


def torchtitan(spec: str | None, k: int = 2, divided: bool = False, **settings: Any) -> Built:
    """With `divided` ready for expert parallelism."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

    from pointsman.engines.torchtitan import Router

    gate = Linear.Config(in_features=DIM, out_features=EXPERTS, bias=False)
    own = TokenChoiceTopKRouter.Config(num_experts=EXPERTS, gate=gate, top_k=k, **settings)
    experts = GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS)
    dispatcher = (AllToAllTokenDispatcher if divided else LocalTokenDispatcher).Config(num_experts=EXPERTS, top_k=k)
    config = MoE.Config(
        num_experts=EXPERTS, router=own if spec is None else Router.Config.like(own, spec), load_balance_coeff=None,
        routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
    )  # fmt: skip
    if divided:
        set_moe_sharding_config(
            config, enable_ep=True, enable_sp=False, expert_param_layout=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"))
        )
    layer = config.build()
    inner = layer.routed_experts.inner_experts
    with torch.no_grad():
        for parameter in inner.parameters():
            nn.init.normal_(parameter, std=0.1)

    def weights() -> dict[str, Tensor]:
        return {"w_gate": inner.w1_EFD.detach(), "w_in": inner.w3_EFD.detach(), "w_out": inner.w2_EDF.detach()}

    return Built(layer, getattr(layer.router, "router", None), layer, weights, lambda: layer.router.gate.weight)


def olmo_core(spec: str | None, k: int = 2, **settings: Any) -> Built:
    """With its own Triton kernels, in Triton's interpreter (TRITON_INTERPRET=1)."""
    from olmo_core.kernels import moe as kernels
    from olmo_core.nn.moe import MoEConfig, MoERouterConfig, MoEType

    from pointsman.engines.olmo_core import RouterConfig

    router = MoERouterConfig(top_k=k, **settings) if spec is None else RouterConfig(spec=spec, top_k=k)
    config = MoEConfig(
        name=MoEType.dropless, num_experts=EXPERTS, hidden_size=HIDDEN, router=router, lb_loss_weight=None
    )
    layer = config.build(DIM)
    for kernel in vars(kernels).values():
        if hasattr(kernel, "configs"):
            kernel.configs = kernel.configs[:1]  # with one there is nothing to measure on a GPU

    def weights() -> dict[str, Tensor]:
        own = {name: value.detach().view(EXPERTS, HIDDEN, DIM) for name, value in layer.experts.mlp.named_parameters()}
        return {"w_gate": own["w1"], "w_in": own["w3"], "w_out": own["w2"].mT}

    def own() -> Tensor:
        found: Tensor = layer.router.weight.view(EXPERTS, DIM)
        return found

    return Built(layer, getattr(layer.router, "router", None), layer, weights, own)


def nemo(spec: str | None, k: int = 2, **settings: Any) -> Built:
    from nemo_automodel.components.models.common.utils import BackendConfig
    from nemo_automodel.components.moe.config import MoEConfig
    from nemo_automodel.components.moe.layers import MoE

    from pointsman.engines.nemo import replace_gates

    config = MoEConfig(
        n_routed_experts=EXPERTS, n_shared_experts=0, n_activated_experts=k, n_expert_groups=1, n_limited_groups=1,
        train_gate=True, gate_bias_update_factor=0.0, aux_loss_coeff=0.0, route_scale=1.0, dim=DIM, inter_dim=HIDDEN,
        moe_inter_dim=HIDDEN, dtype=torch.float32,
        **{"score_func": "softmax", "norm_topk_prob": True, "softmax_before_topk": True, **settings},
    )  # fmt: skip
    layer = MoE(
        config, BackendConfig(linear="torch", rms_norm="torch", attn="sdpa", dispatcher="torch", experts="torch")
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.1)
    if spec is not None:
        replace_gates(layer, spec)
    experts = layer.experts

    def weights() -> dict[str, Tensor]:
        up = experts.gate_and_up_projs.detach().transpose(1, 2)
        gate, value = (up[:, :HIDDEN], up[:, HIDDEN:])
        return {"w_gate": gate, "w_in": value, "w_out": experts.down_projs.detach().transpose(1, 2)}

    return Built(layer, getattr(layer.gate, "router", None), layer, weights, lambda: layer.gate.weight)


BUILDERS: dict[str, tuple[str, Callable[..., Built]]] = {
    "megatron": ("megatron.core.transformer.moe.moe_layer", megatron),
    "torchtitan": ("torchtitan.models.common.moe", torchtitan),
    "olmo_core": ("olmo_core.nn.moe", olmo_core),
    "nemo": ("nemo_automodel.components.moe.layers", nemo),
}
"""Engine -> (the module without which it is not there, how its layer is built)."""
