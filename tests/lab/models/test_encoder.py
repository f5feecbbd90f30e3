"""The encoder against transformers' XLM-R with the same weights, and texts alone against the same in padded batches."""

import pytest
import torch
from torch import Tensor

from pointsman.recording import record_routing
from pointsman.routers.frame.registry import build_router, list_mixers, list_routers
from pointsman_lab.models.encoder import Encoder, EncoderConfig, buckets

SHAPE = {
    "vocab_size": 30, "num_layers": 3, "dim": 32, "num_heads": 4, "head_dim": 8, "hidden_dim": 48, "max_length": 24,
}  # fmt: skip
TEXTS = [[3, 5, 7, 9, 11, 13, 2], [4, 6, 8], [1, 29, 2, 14, 15]]


def build(**changes: object) -> Encoder:
    settings = {**SHAPE, "router": "smoe", "num_experts": 4, "top_k": 2, "moe_layers": "every:2:1", "experts": "ffn"}
    return Encoder(EncoderConfig(**{**settings, "init_std": 0.3, **changes})).eval()  # type: ignore[arg-type]


def padded(texts: list[list[int]] = TEXTS, length: int = 9) -> Tensor:
    return torch.tensor([text + [-1] * (length - len(text)) for text in texts])


def roberta(model: Encoder) -> torch.nn.Module:
    """transformers' masked language model with the weights of this one."""
    from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM

    config = model.config
    other = XLMRobertaForMaskedLM(
        XLMRobertaConfig(
            vocab_size=config.vocab_size, hidden_size=config.dim, num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads, intermediate_size=config.hidden_dim, hidden_act="gelu",
            max_position_embeddings=config.max_length + 2, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5,
        )
    ).eval()  # fmt: skip
    own = model.state_dict()
    kind = other.roberta.embeddings.token_type_embeddings.weight.detach()[0]
    renamed = {
        "embeddings.word_embeddings.weight": own["embedding.weight"],
        "embeddings.LayerNorm.weight": own["embedding.norm.weight"],
        "embeddings.LayerNorm.bias": own["embedding.norm.bias"],
    }
    parts = {
        "attention.self.query": "attention.query", "attention.self.key": "attention.key",
        "attention.self.value": "attention.value", "attention.output.dense": "attention.output",
        "attention.output.LayerNorm": "attention_norm", "output.LayerNorm": "feed_forward_norm",
    }  # fmt: skip
    for index in range(config.num_layers):
        for theirs, ours in parts.items():
            for end in ("weight", "bias"):
                renamed[f"encoder.layer.{index}.{theirs}.{end}"] = own[f"layers.{index}.{ours}.{end}"]
        for theirs, w, b in (("intermediate.dense", "w_in", "b_in"), ("output.dense", "w_out", "b_out")):
            renamed[f"encoder.layer.{index}.{theirs}.weight"] = own[f"layers.{index}.feed_forward.{w}"]
            renamed[f"encoder.layer.{index}.{theirs}.bias"] = own[f"layers.{index}.feed_forward.{b}"]
    state = {f"roberta.{name}": value for name, value in renamed.items()}
    # its positions start at 2, and its one token type is added to every position
    positions = other.roberta.embeddings.position_embeddings.weight.detach().clone()
    positions[2:] = own["embedding.position"] - kind
    state["roberta.embeddings.position_embeddings.weight"] = positions
    head = {"dense": "project", "layer_norm": "norm"}
    state |= {f"lm_head.{a}.{end}": own[f"head.{b}.{end}"] for a, b in head.items() for end in ("weight", "bias")}
    state["lm_head.bias"] = own["head.bias"]
    missing, strange = other.load_state_dict(state, strict=False)
    assert not strange
    assert all("token_type" in name or "decoder" in name or "position_ids" in name for name in missing), missing
    return other


@pytest.mark.parametrize("layers", ["every:2:1", "after:2"])
def test_without_experts_it_is_xlm_roberta(layers: str) -> None:
    model = build(router="plain", moe_layers=layers, init_std=0.1)
    for name, parameter in model.named_parameters():
        if "bias" in name or name.endswith(("b_in", "b_out")):
            parameter.data.normal_(0, 0.1)
    other, tokens = roberta(model), padded()
    mask = tokens >= 0
    ids = torch.where(mask, tokens, 1)
    with torch.no_grad():
        theirs = other.roberta(ids, attention_mask=mask.long(), position_ids=(mask.cumsum(1) * mask) + 1)
        ours, _ = model.encode(tokens)
        torch.testing.assert_close(ours[mask], theirs.last_hidden_state[mask], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.head(ours[mask], model.embedding.weight),
                                   other.lm_head(theirs.last_hidden_state[mask]), rtol=1e-5, atol=1e-5)  # fmt: skip


def test_the_loss_is_that_of_the_masked_positions() -> None:
    model, tokens = build(), padded()
    targets = torch.full_like(tokens, -100)
    targets[0, 2], targets[2, 4] = 7, 3
    logits = model(tokens)
    expected = -logits.log_softmax(-1)[[0, 2], [2, 4], [7, 3]]
    torch.testing.assert_close(model(tokens, targets), expected)


def batch_invariant() -> list[str]:
    routers = [name for name in list_routers() if name != "forced"]  # which goes by the place in the batch
    specs = [*routers, *(f"smoe+{mixer}" for mixer in list_mixers())]
    built = {spec: build_router(spec, dim=8, num_experts=4, vocab_size=30) for spec in specs}
    return [spec for spec, router in built.items() if router.batch_invariant and not router.stochastic]


@pytest.mark.parametrize("spec", batch_invariant())
def test_padding_never_reaches_a_router(spec: str) -> None:
    """A text alone gives what it gives in a padded batch, and no expert is chosen for padding."""
    model, tokens = build(router=spec, norm="pre"), padded()
    with torch.no_grad(), record_routing(model) as records:
        together, _ = model.encode(tokens)
    for routing in records.values():
        if routing.combine.flat is None:
            assert bool((routing.experts[(tokens < 0).reshape(-1)] == -1).all())
        else:
            assert bool((tokens >= 0).reshape(-1)[routing.combine.flat.token].all())
    for row, text in enumerate(TEXTS):
        with torch.no_grad():
            alone, _ = model.encode(torch.tensor([text]))
        torch.testing.assert_close(together[row, : len(text)], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"positions": "t5", "norm": "pre"}, {"moe_layers": "after:1"}])
def test_a_text_looks_both_ways(settings: dict[str, object]) -> None:
    model = build(router="smoe+attention:heads=all", **settings)
    first = torch.tensor([TEXTS[0]])
    other = first.clone()
    other[0, -1] = 20
    with torch.no_grad():
        one, two = model.encode(first)[0], model.encode(other)[0]
    assert not torch.allclose(one[0, 0], two[0, 0])


def test_x_moe_layer_stands_bare_after_six_blocks() -> None:
    config = EncoderConfig(vocab_size=100)
    with torch.device("meta"):
        model = Encoder(config)
    assert model.inserted is not None
    assert model.inserted.feed_forward_norm is None
    sparse = sum(parameter.numel() for parameter in model.inserted.parameters())
    assert sparse == pytest.approx(453.5e6, rel=1e-3)  # 32 experts of 3 x (768 -> 3072 -> 768)
    backbone = sum(parameter.numel() for parameter in model.parameters()) - sparse - 100 * 769 + 250_002 * 769
    assert backbone == pytest.approx(277.5e6 + 0.85e6, rel=2e-3)  # X-MoE's dense model, with the output's own layer


def test_buckets_are_those_of_t5() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional=True, num_buckets=32, max_distance=128)
    assert torch.equal(buckets(distance), theirs)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(ValueError, match="max_length is 24"):
        build().encode(torch.ones(1, 25, dtype=torch.int64))
    with pytest.raises(ValueError, match="norm='mid'"):
        build(norm="mid")
