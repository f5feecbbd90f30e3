"""The decoder against transformers' models with the same weights, and its cache against one long forward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.routers.frame.registry import build_router, list_mixers, list_routers
from pointsman_lab.models.decoder import Decoder, DecoderConfig
from pointsman_lab.models.huggingface.convert import load_theirs

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "num_layers": 2, "dim": 32, "num_heads": 4, "kv_heads": 2, "head_dim": 8, "hidden_dim": 24,
    "num_experts": 4, "top_k": 2, "init_std": 0.2,
}  # fmt: skip


def build(**changes: Any) -> Decoder:
    return Decoder(DecoderConfig(**{**SHAPE, **changes})).eval()


def peer(name: str, theta: float, scaling: dict[str, Any] | None, **changes: Any) -> torch.nn.Module:
    import transformers

    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    shape = {
        "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "tie_word_embeddings": False, "rope_parameters": rope,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "pad_token_id": None, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**shape, **changes})
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.15)
    return model


def deepseek(name: str, theta: float, scaling: dict[str, Any] | None, **changes: Any) -> torch.nn.Module:
    """DeepSeek-V3 with the attention of Llama in the place of its latent attention."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    model: Any = peer(name, theta, scaling, **changes)
    model.config.attention_bias = False
    model.config.head_dim = 8
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = LlamaAttention(model.config, index)
    other: torch.nn.Module = model
    return other.eval()


SIGMOID = {
    "intermediate_size": 40, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip
LOSS_FREE = {
    "router": "loss-free:groups=4:kept=2:scale=2.5", "shared_experts": 2, "hidden_dim": 40, "expert_hidden_dim": 24,
    "num_experts": 8, "moe_layers": "last:1", "tied": False,
}  # fmt: skip
PEERS: dict[str, Any] = {
    "Mixtral": (
        peer, {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 8},
        {"router": "smoe:bias=false", "tied": False}, None,
    ),
    "Olmoe": (
        peer, {"intermediate_size": 24, "num_experts": 4, "norm_topk_prob": False},
        {"router": "smoe:bias=false:renormalize=false", "qk_norm": "all", "tied": False}, None,
    ),
    "Qwen3Moe": (
        peer,
        {"moe_intermediate_size": 24, "intermediate_size": 40, "num_experts": 4, "norm_topk_prob": True, "head_dim": 8,
         "mlp_only_layers": [0], "tie_word_embeddings": True},
        {"router": "smoe:bias=false", "qk_norm": "head", "moe_layers": "last:1", "hidden_dim": 40,
         "expert_hidden_dim": 24}, None,
    ),
    "Qwen2Moe": (
        peer,
        {"moe_intermediate_size": 24, "intermediate_size": 40, "num_experts": 4, "norm_topk_prob": False,
         "shared_expert_intermediate_size": 48, "qkv_bias": False, "mlp_only_layers": [1]},
        {"router": "smoe:bias=false:renormalize=false", "moe_layers": "0", "hidden_dim": 40, "expert_hidden_dim": 24,
         "shared_experts": 2, "shared_gate": True, "tied": False}, "shared_expert",
    ),
    "Dots1": (peer, SIGMOID, {**LOSS_FREE, "qk_norm": "head"}, "shared_experts"),
    "Glm4Moe": (peer, {**SIGMOID, "partial_rotary_factor": 1.0}, LOSS_FREE, "shared_experts"),
    "DeepseekV3": (
        deepseek, {**SIGMOID, "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                   "v_head_dim": 8}, LOSS_FREE, "shared_experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_its_logits_are_those_of_transformers(name: str) -> None:
    """Prefill, token by token with a cache, and a padded batch."""
    make, theirs, ours, shared = PEERS[name]
    other = make(name, 5000.0, None, **theirs)
    model = build(rope_theta=5000.0, norm_eps=1e-5, **ours)
    for gate in (module for module in other.modules() if hasattr(module, "e_score_correction_bias")):
        gate.e_score_correction_bias.normal_(0, 0.3)
    assert load_theirs(model, other.state_dict(), shared) == []
    torch.manual_seed(1)
    tokens = torch.randint(40, (2, 11))
    with torch.no_grad():
        expected = other(tokens).logits
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        output = model(tokens[:, :6], memory_length=20)
        got = [output.logits]
        for place in range(6, 11):
            output = model(tokens[:, place : place + 1], memory=output.memory, memory_length=20)
            got.append(output.logits)
        torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-5, atol=1e-5)
        for mask in (torch.ones(2, 11).bool(), torch.ones(2, 11).bool()):
            mask[0, :3] = False
            mask[1, 9:] = False
            wanted = other(tokens, attention_mask=mask.long()).logits
            torch.testing.assert_close(model(tokens, padding_mask=mask).logits[mask], wanted[mask],
                                       rtol=1e-5, atol=1e-5)  # fmt: skip


def causal() -> list[str]:
    routers = [name for name in list_routers() if name != "forced"]  # which goes by the place in the batch
    specs = [*routers, *(f"smoe+{mixer}" for mixer in list_mixers())]
    built = {spec: build_router(spec, dim=8, num_experts=4, vocab_size=40) for spec in specs}
    return [
        spec for spec, router in built.items()
        if router.causal and router.training_causal and router.batch_invariant and not router.stochastic
    ]  # fmt: skip


@pytest.mark.parametrize("spec", causal())
def test_token_by_token_is_the_long_forward(spec: str) -> None:
    model, tokens = build(router=spec, moe_layers="after:1" if "attention" in spec else "all"), draw(2, 7)
    with torch.no_grad():
        expected = model(tokens).logits
        memory, got = None, []
        for place in range(7):
            output = model(tokens[:, place : place + 1], memory=memory, memory_length=10)
            memory = output.memory
            got.append(output.logits)
    torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-4, atol=1e-4)


def draw(*shape: int) -> Tensor:
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(3))


def test_a_memory_that_forgets_keeps_distances() -> None:
    """With one layer, positions act through differences alone: a shorter memory is the end of the text alone."""
    model, tokens = build(num_layers=1), draw(1, 12)
    with torch.no_grad():
        memory = model(tokens[:, :9], memory_length=4).memory
        got = model(tokens[:, 9:], memory=memory).logits
        alone = model(tokens[:, 5:]).logits[:, 4:]
    torch.testing.assert_close(got[:, :1], alone[:, :1], rtol=1e-5, atol=1e-5)


def test_the_loss_is_the_cross_entropy_and_trains_everything() -> None:
    model, tokens = build(shared_experts=1, tied=False, qk_norm="head").train(), draw(2, 8)
    output = model(tokens[:, :-1], tokens[:, 1:])
    logits = model(tokens[:, :-1]).logits
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1),
                                                                              tokens[:, 1:].flatten()))  # fmt: skip
    output.loss.backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_mistakes_are_one_line() -> None:
    for changes, message in (
        ({"kv_heads": 3}, "divisors of num_heads=4"),
        ({"head_dim": 7}, "even numbers"),
        ({"qk_norm": "heads"}, "did you mean 'head'"),
        ({"rope_theta": 0.0}, "above 0"),
        ({"context_length": 0}, "context_length=0"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**changes)
