"""Upcycled models compute what the dense ones did."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import pointsman
from pointsman import hf
from tests.library.hf.test_replace import IDS, logits, move

DENSE = {"llama": "MixtralForCausalLM", "mistral": "MixtralForCausalLM", "qwen2": "Qwen2MoeForCausalLM"}
DENSE |= {"qwen3": "Qwen3MoeForCausalLM"}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def dense(kind: str, factory: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = factory.from_config(AutoConfig.for_model(kind, **{**SMALL, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("router", [None, "hyperrouter", "xmoe+similarity", "loss-free", "smoe:gate=sigmoid"])
def test_equal_at_the_start_for_every_k(kind: str, router: str | None) -> None:
    model = dense(kind)
    mixture = hf.upcycle(model, 4, router=router)
    assert type(mixture).__name__ == DENSE[kind]
    assert not mixture.training
    for k in (1, 2, 4):
        with pointsman.set_top_k(mixture, k):
            torch.testing.assert_close(logits(mixture), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", DENSE)
def test_settings_come_along(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    model = dense(kind, tie_word_embeddings=True, rms_norm_eps=1e-3, rope_parameters=rope)
    mixture = hf.upcycle(model, 4)
    torch.testing.assert_close(logits(mixture), logits(model), rtol=1e-5, atol=1e-5)
    assert mixture.config.rope_parameters["rope_theta"] == 5000.0
    assert mixture.lm_head.weight is mixture.model.embed_tokens.weight
    mixture.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)


def test_options_that_depend_on_the_number_of_experts() -> None:
    model = dense("llama")
    mixture = hf.upcycle(model, num_experts=16, top_k=2, router="loss-free:groups=8")
    torch.testing.assert_close(logits(mixture), logits(model), rtol=1e-4, atol=1e-5)


def test_bare_transformer_and_bfloat16() -> None:
    model = dense("llama", AutoModel)
    mixture = hf.upcycle(model, 4)
    assert isinstance(mixture, transformers.MixtralModel)
    with torch.no_grad():
        torch.testing.assert_close(mixture(IDS)[0], model(IDS)[0], rtol=1e-5, atol=1e-5)
    assert hf.upcycle(dense("llama").to(torch.bfloat16), 2).dtype == torch.bfloat16


def test_dense_model_stays_and_experts_are_their_own() -> None:
    model = dense("llama")
    before = logits(model)
    mixture = hf.upcycle(model, 4).train()
    mixture(IDS, labels=IDS).loss.backward()
    experts = mixture.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[0] += 1
    assert not torch.equal(experts.gate_up_proj[0], experts.gate_up_proj[1])
    assert torch.equal(logits(model), before)


def test_noise_parts_the_experts() -> None:
    model = dense("qwen3")
    torch.manual_seed(0)
    mixture = hf.upcycle(model, 4, noise=0.01)
    weight = mixture.model.layers[0].mlp.experts.down_proj
    part = (weight[0] - weight[1]).std() / model.model.layers[0].mlp.down_proj.weight.std()
    assert float(part.detach()) == pytest.approx(0.01 * 2**0.5, rel=0.15)
    difference = (logits(mixture) - logits(model)).abs().max()
    assert 1e-5 < float(difference) < 0.2


def test_router_trains_and_materializes() -> None:
    mixture = hf.upcycle(dense("mistral"), 4, router="hyperrouter", noise=0.1)
    move(mixture)
    trained = logits(mixture)
    hf.materialize(mixture)
    torch.testing.assert_close(logits(mixture), trained, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "arguments", "changes", "words"),
    [
        ("gpt2", {}, {"n_embd": 32, "n_head": 4, "n_layer": 1}, "gpt2"),
        ("llama", {"num_experts": 0}, {}, "num_experts"),
        ("llama", {"top_k": 5}, {}, "from 1 to 4"),
        ("llama", {"noise": -1.0}, {}, "noise"),
        ("llama", {"noise": float("inf")}, {}, "noise"),
        ("llama", {"noise": True}, {}, "noise"),
        ("llama", {}, {"attention_bias": True}, "attention_bias"),
        ("llama", {"router": "smoe|sparsemixer"}, {}, "weights of 'sparsemixer' do not sum to 1"),
        ("llama", {"router": "smoe:renormalize=false"}, {}, "do not sum to 1"),
        ("llama", {"router": "smoe:renormalize=false", "top_k": 4}, {}, "do not sum to 1 at k="),  # all that it has
        ("qwen3", {"router": "loss-free:scale=2.5"}, {}, "do not sum to 1"),
        ("qwen3", {}, {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}, "sliding"),
    ],
)
def test_refusals(kind: str, arguments: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hf.upcycle(dense(kind, **changes), **{"num_experts": 4, **arguments})
