"""The MoE layers of Megatron-core and NeMo Automodel, trained as their own trainers do it."""

# mypy: disable-error-code="no-any-return"
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from pointsman.testing.trainers.case import BIAS_RATE, DIM, Batch, NotApplicable, Setting, world
from pointsman_lab.checks.layers import HIDDEN, Layer, OfLayers


class Megatron(OfLayers):
    """Megatron-core's `MoELayer`; the loss and its scale are made by `forward_step_calc_loss` of its schedules.

    Attributes:
        loss: its `moe_router_load_balancing_type`.
        context: whether two processes share sequences (context parallelism), not the batch.
        per_token: `calculate_per_token_loss`.
    """

    name = "megatron"
    packages = ("megatron-core", "torch")
    loss = "aux_loss"
    context = per_token = False
    asked_ours = False

    @contextmanager
    def patched(self) -> Iterator[None]:
        router = importlib.import_module("megatron.core.transformer.moe.router")
        product = "router_gating_linear"  # Transformer Engine's, for a GPU only
        log = "save_to_aux_losses_tracker"  # on a GPU
        with (
            super().patched(),
            mock.patch.object(router, product, lambda x, weight, bias, dtype: x.to(dtype) @ weight.to(dtype).T),
            mock.patch.object(router, log),
        ):
            yield

    def read(self, hidden: Tensor) -> Tensor:
        """Megatron's own router is given [S, B, dim], ours [B, S, dim]."""
        return super().read(hidden if self.asked_ours else hidden.transpose(0, 1))

    @property
    def shared(self) -> int:
        """Processes that share sequences."""
        return world() if self.context else 1

    def layer(self, setting: Setting, place: int) -> Layer:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import SequentialMLP
        from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_config import TransformerConfig

        from pointsman.engines.megatron import router

        self.asked_ours = setting.balance == "pointsman"
        if not dist.is_initialized():  # a process group of one
            alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": HashStore()}
            dist.init_process_group("gloo", **alone)  # type: ignore[arg-type]
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(context_parallel_size=self.shared)
        own: dict[str, Any] = {"moe_router_load_balancing_type": "none"}
        if setting.balance == "own" and setting.coefficient:
            own = {"moe_router_load_balancing_type": self.loss, "moe_aux_loss_coeff": setting.coefficient}
        if setting.balance == "own" and setting.bias:
            own |= {
                "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
                "moe_router_bias_update_rate": BIAS_RATE,
            }  # fmt: skip
        config = TransformerConfig(
            num_layers=1, hidden_size=DIM, num_attention_heads=2, num_moe_experts=setting.experts,
            moe_router_topk=setting.k, moe_token_dispatcher_type="allgather", ffn_hidden_size=HIDDEN,
            moe_ffn_hidden_size=HIDDEN, add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu,
            use_cpu_initialization=True, bias_activation_fusion=False, moe_router_pre_softmax=setting.k == 1,
            moe_router_dtype="fp32", context_parallel_size=self.shared, calculate_per_token_loss=self.per_token, **own,
        )  # fmt: skip
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = ModuleSpec(module=SequentialMLP, submodules=linear)
        given = {} if setting.balance == "own" else {"router": router(self.spec(setting))}
        layer = MoELayer(config, MoESubmodules(experts, **given), layer_number=1)

        def call(moe: Any, hidden: Tensor, real: Tensor) -> Tensor:
            padding = None if bool(real.all()) else ~real
            found: Tensor = moe(hidden.transpose(0, 1).contiguous(), padding_mask=padding)[0]
            return found.transpose(0, 1)

        return Layer(layer, call)

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

        config = next(module.config for module in model.modules() if hasattr(module, "config"))
        self.tokens = 0
        for one in batches:
            output = model(**one)
            count = one.get("attention_mask", torch.ones_like(one["labels"])).sum() if self.per_token else output.labels
            loss, tokens = forward_step_calc_loss(
                model, output.total, lambda total, count=count: (total, count, {}), config, None, False,
                len(batches), [], self.shared, True,
            )  # fmt: skip
            self.tokens += int(tokens)
            loss.backward()

    def before_step(self, model: Any) -> None:
        from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

        if self.per_token:  # `finalize_model_grads`: sums over ranks, of which DistributedDataParallel made means
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self.tokens
        config = model.layers[0].moe.config
        if config.moe_router_enable_expert_bias:
            _update_router_expert_bias([model], config)

    def bias(self, moe: Any) -> Tensor:
        return moe.router.expert_bias

    def experts(self, model: Any) -> list[Tensor]:
        local = model.layers[0].moe.experts.local_experts
        return [torch.stack([getattr(one, name).weight for one in local]) for name in ("linear_fc1", "linear_fc2")]


class MegatronGlobal(Megatron):
    """The same with the balance loss of the tokens of all ranks."""

    name = "megatron-global"
    loss = "global_aux_loss"

    def spec(self, setting: Setting) -> str:
        raise NotApplicable("a router of ours replaces its loss: see megatron")


class MegatronPerToken(Megatron):
    """The same with gradients divided by the tokens of the step, and context parallelism."""

    name = "megatron-per-token"
    context = per_token = True


class Nemo(OfLayers):
    """NeMo Automodel's `MoE`; the losses' scale is set as its recipes do, once a step."""

    name = "nemo"
    packages = ("nemo-automodel", "torch")
    context = False

    def layer(self, setting: Setting, place: int) -> Layer:
        from nemo_automodel.components.models.common.utils import BackendConfig
        from nemo_automodel.components.moe.config import MoEConfig
        from nemo_automodel.components.moe.layers import MoE

        from pointsman.engines.nemo import replace_gates

        own = setting.balance == "own"
        config = MoEConfig(
            n_routed_experts=setting.experts, n_shared_experts=0, n_activated_experts=setting.k, n_expert_groups=1,
            n_limited_groups=1, train_gate=True, gate_bias_update_factor=BIAS_RATE if own and setting.bias else 0.0,
            aux_loss_coeff=setting.coefficient if own else 0.0, route_scale=1.0, dim=DIM, inter_dim=HIDDEN,
            moe_inter_dim=HIDDEN, dtype=torch.float32, norm_topk_prob=True, softmax_before_topk=True,
            score_func="sigmoid" if self.sigmoid or setting.bias else "softmax",
        )  # fmt: skip
        backend = BackendConfig(linear="torch", rms_norm="torch", attn="sdpa", dispatcher="torch", experts="torch")
        layer = MoE(config, backend)
        if not own:
            replace_gates(layer, self.spec(setting))
        if self.context and world() > 1:
            layer.cp_mesh = init_device_mesh("cpu", (world(),))
        return Layer(layer, lambda moe, hidden, real: moe(hidden, padding_mask=~real))

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        from nemo_automodel.components.moe.megatron.moe_utils import MoEAuxLossAutoScaler
        from nemo_automodel.recipes.base_recipe import BaseRecipe

        recipe = mock.Mock(pp_enabled=False)
        recipe._get_cp_group_size.return_value = world() if self.context else 1
        labels = int(self.labels(batches))
        BaseRecipe._set_moe_aux_loss_backward_scale(recipe, num_batches=len(batches), num_label_tokens=labels)
        super().backward(model, batches, setting)
        assert MoEAuxLossAutoScaler.main_loss_backward_scale is not None

    def after_step(self, model: Any) -> None:
        super().after_step(model)
        for layer in model.layers:
            if layer.moe.gate.bias_update_factor > 0:
                layer.moe.gate.update_bias()

    def own(self, moe: Any) -> Any:
        return moe.gate

    def bias(self, moe: Any) -> Tensor:
        return moe.gate.e_score_correction_bias


class NemoSigmoid(Nemo):
    """The same with sigmoid scores, as DeepSeek-V3 has them."""

    name = "nemo-sigmoid"
    sigmoid = True

    def spec(self, setting: Setting) -> str:
        raise NotApplicable("the balance losses of our routers are of the softmax, whatever the gate")
