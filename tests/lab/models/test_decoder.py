"""The decoder against transformers' models with the same weights, and its cache against one long forward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.lab.models import Decoder, DecoderConfig
from pointsman.lab.models.decoder import frequencies
from pointsman.routers.registry import build_router, list_mixers, list_routers

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


def copy(theirs: torch.nn.Module, ours: Decoder) -> Decoder:
    state = {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    renamed = {"embedding.weight": state["embed_tokens.weight"], "final_norm.weight": state["norm.weight"]}
    if not ours.config.tied:
        renamed["embedding.output"] = state["lm_head.weight"]
    parts = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
    norms = {"q_norm": "query_norm", "k_norm": "key_norm"} if ours.config.qk_norm != "none" else {}
    for index, layer in enumerate(ours.layers):
        there, here = f"layers.{index}.", f"layers.{index}."
        for a, b in {**parts, **norms}.items():
            renamed[f"{here}attention.{b}.weight"] = state[f"{there}self_attn.{a}.weight"]
        renamed[f"{here}attention_norm.weight"] = state[f"{there}input_layernorm.weight"]
        renamed[f"{here}feed_forward_norm.weight"] = state[f"{there}post_attention_layernorm.weight"]
        if layer.moe is None:
            for a, b in (("gate_proj", "w_gate"), ("up_proj", "w_in"), ("down_proj", "w_out")):
                renamed[f"{here}feed_forward.{b}"] = state[f"{there}mlp.{a}.weight"]
            continue
        renamed[f"{here}moe.router.score.weight"] = state[f"{there}mlp.gate.weight"]
        gate, up = state[f"{there}mlp.experts.gate_up_proj"].chunk(2, 1)
        renamed |= {f"{here}moe.experts.w_gate": gate, f"{here}moe.experts.w_in": up}
        renamed[f"{here}moe.experts.w_out"] = state[f"{there}mlp.experts.down_proj"]
    missing, strange = ours.load_state_dict(renamed, strict=False)
    assert not strange
    assert not missing
    return ours


PEERS = {
    "Mixtral": (
        peer, {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 8},
        {"router": "smoe:bias=false", "tied": False},
    ),
    "Olmoe": (
        peer, {"intermediate_size": 24, "num_experts": 4, "norm_topk_prob": False},
        {"router": "smoe:bias=false:renormalize=false", "qk_norm": "all", "tied": False},
    ),
    "Qwen3Moe": (
        peer,
        {"moe_intermediate_size": 24, "intermediate_size": 40, "num_experts": 4, "norm_topk_prob": True, "head_dim": 8,
         "mlp_only_layers": [0], "tie_word_embeddings": True},
        {"router": "smoe:bias=false", "qk_norm": "head", "moe_layers": "last:1", "hidden_dim": 40,
         "expert_hidden_dim": 24},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_its_logits_are_those_of_transformers(name: str) -> None:
    """Prefill, token by token with a cache, and a padded batch."""
    make, theirs, ours = PEERS[name]
    other = make(name, 5000.0, None, **theirs)
    model = copy(other, build(rope_theta=5000.0, **ours))
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


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("linear", {"factor": 4.0}),
        (
            "llama3",
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_scaled_frequencies_are_those_of_transformers(kind: str, extra: dict[str, Any]) -> None:
    other = peer("Mixtral", 500.0, {"rope_type": kind, **extra}, intermediate_size=24, num_local_experts=4)
    config = DecoderConfig(**SHAPE, rope_theta=500.0, rope_scaling=kind, rope_factor=extra["factor"], rope_length=32)  # type: ignore[arg-type]
    torch.testing.assert_close(frequencies(config), other.model.rotary_emb.inv_freq)


def causal() -> list[str]:
    specs = [*list_routers(), *(f"smoe+{mixer}" for mixer in list_mixers())]
    routers = {spec: build_router(spec, dim=8, num_experts=4, vocab_size=40) for spec in specs}
    return [
        spec for spec, router in routers.items()
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
    ):
        with pytest.raises(ValueError, match=message):
            build(**changes)
