"""A step of your own on a tiny Mixtral, or a DeepSeek-V3 where a bias is asked for."""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pointsman.testing.trainers.case import BIAS_RATE, DIM, VOCABULARY, Batch, NotApplicable, Setting, Trainer, world

Step = Callable[..., object]


class OfTransformers(Trainer):
    """A trainer of models of transformers."""

    packages: Sequence[str] = ("transformers", "torch")

    def model(self, setting: Setting) -> nn.Module:
        """Mixtral with its own loss or with `hf.balance`; DeepSeek-V3 where a bias is asked for."""
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

        from pointsman import hf

        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY, "hidden_size": DIM, "intermediate_size": 16, "num_hidden_layers": setting.layers,
            "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": setting.k, "use_cache": False,
            "max_position_embeddings": 64,
        }  # fmt: skip
        torch.manual_seed(0)
        model: Any
        if setting.bias:
            model = DeepseekV3ForCausalLM(
                DeepseekV3Config(
                    **sizes, moe_intermediate_size=16, n_routed_experts=setting.experts, n_group=1, topk_group=1,
                    n_shared_experts=1, first_k_dense_replace=0, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
                    qk_nope_head_dim=8, v_head_dim=8,
                )
            )  # fmt: skip
        else:
            own: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": setting.coefficient}
            asked = own if setting.balance == "own" and setting.coefficient else {}
            model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=setting.experts, **asked))
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 0.05  # a part that all tokens share, for collapsed layers
            for place, layer in enumerate(model.model.layers):
                gate = layer.mlp.gate.weight
                gate.mul_(10)
                if setting.layers > 1:
                    gate[place % setting.experts, 0] += 1.0  # every layer prefers another expert
        if setting.balance == "pointsman" and (setting.coefficient or setting.bias):
            with patch.object(logging.getLogger("pointsman.hf"), "disabled", True):
                hf.balance(model, *(BIAS_RATE, "bias") if setting.bias else (setting.coefficient, "loss"))
        return self.finished(model, setting).train()

    def finished(self, model: nn.Module, setting: Setting) -> nn.Module:
        return model

    def layers(self, model: Any) -> Any:
        return model.model.layers

    def gates(self, model: nn.Module) -> list[tuple[nn.Module, Tensor]]:
        return [(layer.mlp.gate, layer.mlp.gate.weight) for layer in self.layers(model)]

    def experts(self, model: nn.Module) -> list[Tensor]:
        experts = self.layers(model)[0].mlp.experts
        return [experts.gate_up_proj, experts.down_proj]

    def biases(self, model: nn.Module) -> list[Tensor]:
        return [layer.mlp.gate.e_score_correction_bias for layer in self.layers(model)]


def prepared(model: Any, setting: Setting) -> Any:
    """The model as a plain loop makes it ready: checkpointing, compilation, DistributedDataParallel."""
    if setting.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if world() > 1 and dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    return torch.compile(model, backend="aot_eager") if setting.compiled else model


class OwnStep(OfTransformers):
    """`step(model, batches)`: one optimizer step on a list of micro-batches.

    A step that also takes `max_norm` or `bf16` is asked for clipping or mixed precision.
    """

    starts_group = True

    def __init__(self, step: Step, name: str = "") -> None:
        self.step, self.name = step, name or getattr(step, "__name__", "step")
        self.words = inspect.signature(step).parameters

    def train(self, model: nn.Module, steps: Sequence[Sequence[Batch]], setting: Setting) -> None:
        asked = {"max_norm": setting.max_norm, "bf16": setting.bf16 or None}
        given = {name: value for name, value in asked.items() if value is not None}
        free = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in self.words.values())
        for name in given:
            if name not in self.words and not free:
                raise NotApplicable(f"the step takes no {name}")
        ready = prepared(model, setting)
        for batches in steps:
            self.step(ready, batches, **given)
