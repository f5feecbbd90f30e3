"""The MoE layers of OLMo-core and torchtitan, trained as their own trainers do it.

With balance "pointsman" our router is in their place (`pointsman.engines`). OLMo's experts, Triton kernels for a GPU,
are replaced by a loop.
"""

# mypy: disable-error-code="no-any-return"
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.testing.trainers.case import BIAS_RATE, DIM, Batch, NotApplicable, Setting
from pointsman_lab.checks.layers import HIDDEN, Layer, OfLayers


class OlmoCore(OfLayers):
    """OLMo-core's `MoE`; losses are divided by the tokens of the whole step, as its train module does."""

    name = "olmo_core"
    packages = ("ai2-olmo-core", "torch")
    divisor: Any = None

    def layer(self, setting: Setting, place: int) -> Layer:
        from olmo_core.nn.moe import MoEConfig, MoERouterConfig

        from pointsman.engines.olmo_core import RouterConfig

        own = setting.balance == "own"
        bias: dict[str, Any] = {"bias_gamma": BIAS_RATE} if setting.bias else {}
        router = MoERouterConfig(top_k=setting.k, **bias)
        if not own:
            router = RouterConfig(spec=self.spec(setting), top_k=setting.k)
        config = MoEConfig(
            num_experts=setting.experts, hidden_size=HIDDEN, router=router, capacity_factor=float(setting.experts),
            lb_loss_weight=setting.coefficient if own and setting.coefficient else None,
        )  # fmt: skip
        layer = config.build(DIM)
        layer.experts = LoopOfExperts(setting.experts)
        return Layer(layer, lambda moe, hidden, real: moe(hidden, loss_div_factor=self.divisor))

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        self.divisor = torch.tensor(float(sum(one["labels"].numel() for one in batches)))
        super().backward(model, batches, setting)
        for layer in model.module.layers if hasattr(model, "module") else model.layers:
            layer.moe.post_batch()

    def bias(self, moe: Any) -> Tensor:
        return moe.router.score_bias


class LoopOfExperts(nn.Module):
    """Called as OLMo calls its experts: one expert after the other."""

    def __init__(self, experts: int, dim: int = DIM) -> None:
        super().__init__()
        self.w_gate, self.w_in = (nn.Parameter(0.1 * torch.randn(experts, HIDDEN, dim)) for _ in range(2))
        self.w_out = nn.Parameter(0.1 * torch.randn(experts, dim, HIDDEN))

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        for expert in range(len(self.w_out)):
            hidden = F.silu(x @ self.w_gate[expert].T) * (x @ self.w_in[expert].T)
            share = (weights * (indices == expert)).sum(-1, keepdim=True).to(x.dtype)
            output = output + share * (hidden @ self.w_out[expert].T)
        return output


class Torchtitan(OfLayers):
    """torchtitan's `MoE`; its bias moves before the optimizer step, in its own hook."""

    name = "torchtitan"
    packages = ("torchtitan", "torch")

    def layer(self, setting: Setting, place: int) -> Layer:
        from torchtitan.models.common.linear import Linear
        from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
        from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

        from pointsman.engines.torchtitan import Router

        if setting.balance == "own" and setting.coefficient:
            raise NotApplicable("it adds no balance loss")
        gate = Linear.Config(in_features=DIM, out_features=setting.experts, bias=False)
        own = TokenChoiceTopKRouter.Config(num_experts=setting.experts, gate=gate, top_k=setting.k)
        experts = GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=setting.experts)
        dispatcher = LocalTokenDispatcher.Config(num_experts=setting.experts, top_k=setting.k)
        layer = MoE.Config(
            num_experts=setting.experts,
            router=own if setting.balance == "own" else Router.Config.like(own, self.spec(setting)),
            load_balance_coeff=BIAS_RATE if setting.balance == "own" and setting.bias else None,
            routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
        ).build()  # fmt: skip
        return Layer(layer, lambda moe, hidden, real: moe(hidden))

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        from pointsman.engines.torchtitan import set_loss_scale

        if setting.balance == "pointsman":
            set_loss_scale(model, 1 / len(batches))
        super().backward(model, batches, setting)

    def before_step(self, model: Any) -> None:
        from torchtitan.components.optimizer import register_moe_load_balancing_hook

        blocks = [mock.Mock(moe_enabled=True, moe=layer.moe, checkpoint_impl=None) for layer in model.layers]
        part = mock.Mock()
        part.get_submodule.return_value = Blocks({str(place): block for place, block in enumerate(blocks)})
        ranks = mock.Mock(ep_enabled=False, tp=1)
        ranks.get_optional_mesh.return_value = None
        optimizers = mock.Mock()
        with mock.patch("torchtitan.components.optimizer.optimizer.nn.ModuleDict", Blocks):
            register_moe_load_balancing_hook(optimizers, [part], ranks)
            for call in optimizers.register_step_pre_hook.call_args_list:
                call.args[0]()

    def weight(self, moe: Any) -> Tensor:
        ours = self.ours(moe)
        return moe.router.gate.weight if ours is None else ours.score.weight

    def bias(self, moe: Any) -> Tensor:
        return moe.expert_bias_E

    def experts(self, model: Any) -> list[Tensor]:
        return [*model.layers[0].moe.routed_experts.inner_experts.parameters()]


class Blocks(dict[str, Any]):
    """Transformer blocks by number, where torchtitan's hook looks for them."""
