"""Language models with routers and experts that ask for more of a model: mixers, a state from below, base experts."""

import pytest
import torch
from torch import nn

import pointsman
from pointsman import MoE, record_routing
from pointsman.experts.modules import BaseExperts
from pointsman_lab.models import transformer_xl
from pointsman_lab.models.cost import Protocol, inference_flops, parameter_table
from pointsman_lab.models.decoder import Decoder, DecoderConfig
from pointsman_lab.models.traced_attention import traced_attention
from pointsman_lab.models.transformer_xl import TransformerXL, TransformerXLConfig

B = 2


def model(spec: str, **changes: object) -> TransformerXL:
    settings = {"num_layers": 2, "dim": 16, "num_heads": 2, "head_dim": 8, "hidden_dim": 16, "num_experts": 4}
    config = TransformerXLConfig(vocab_size=23, router=spec, **{**settings, **changes})
    built = TransformerXL(config).double().eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if ".score." in name and parameter.dim() == 2:
                parameter.mul_(20)
        for name, buffer in built.named_buffers():
            if name.endswith("sigma"):
                buffer.fill_(0.5)
    return built


@pytest.mark.parametrize("spec", ["smoe+attention", "smoe+attention:heads=all"])
def test_single_heads_of_the_trace_give_the_gradients_of_the_whole(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(23, (B, 12), generator=torch.Generator().manual_seed(0))
    results = []
    for whole in (False, True):
        if whole:
            without = lambda *a, **b: (traced_attention(*a, **b)[0], None)  # noqa: E731
            monkeypatch.setattr(transformer_xl, "traced_attention", without)
        built = model(spec, dropout=0.0).train()
        memory = built(tokens, memory_length=7).memory
        built(tokens[:, :-1], tokens[:, 1:], memory=memory, memory_length=7).loss.backward()
        results.append([parameter.grad for parameter in built.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


MODELS = [
    "smoe+similarity",
    "smoe+attention",
    "xmoe+attention:heads=all",
    "smoe+similarity:neighbours=lower-entropy|smoe+attention",
]


@pytest.mark.parametrize("changes", [{}, {"pre_norm": True}, {"moe_layers": "every:2"}, {"moe_layers": "after:1"}])
@pytest.mark.parametrize("spec", MODELS)
def test_a_model_token_by_token_is_the_model_in_one_pass(spec: str, changes: dict[str, object]) -> None:
    built = model(spec, **changes)
    tokens = torch.randint(23, (B, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = built(tokens)
        memory, logits = None, []
        for t in range(12):
            output = built(tokens[:, t : t + 1], memory=memory, memory_length=20)
            memory = output.memory
            logits.append(output.logits)
        torch.testing.assert_close(torch.cat(logits, 1), together.logits)
        other = tokens.clone()
        other[:, 8] = (other[:, 8] + 1) % 23
        after = built(other).logits
    torch.testing.assert_close(after[:, :8], together.logits[:, :8], atol=0, rtol=1e-12)
    assert not torch.allclose(after[:, 8:], together.logits[:, 8:])


@pytest.mark.parametrize("spec", MODELS)
def test_a_model_in_segments_with_a_short_memory_and_padding(spec: str) -> None:
    """Segments of 3 with a memory of 5: carries and memory are cut alike."""
    built = model(spec)
    tokens = torch.randint(23, (B, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(B, 12, dtype=torch.bool)
    mask[0, :4] = False
    with torch.no_grad():
        memory, logits = None, []
        for start in range(0, 12, 3):
            piece = mask[:, start : start + 3]
            output = built(tokens[:, start : start + 3], memory=memory, memory_length=5, padding_mask=piece)
            memory = output.memory
            logits.append(output.logits)
            for carry in memory.carries.values():
                assert all(tensor.shape[1] == memory.length for tensor in carry.values())
        alone, memory = [], None
        for start in range(3, 12, 3):  # the first sequence without its padding, as it is cut
            skip = 1 if start == 3 else 0
            output = built(tokens[:1, start + skip : start + 3], memory=memory, memory_length=5)
            memory = output.memory
            alone.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1)[0, 4:9], torch.cat(alone, 1)[0, :5])


@pytest.mark.parametrize("spec", ["smoe+similarity", "smoe+attention"])
def test_checkpointed_activations_change_nothing(spec: str) -> None:
    tokens = torch.randint(23, (B, 12), generator=torch.Generator().manual_seed(0))
    results = []
    for checkpointed in (False, True):
        built = model(spec, checkpoint_activations=checkpointed, dropout=0.0).train()
        built(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        pointsman.step_end(built)
        results.append([*(p.grad for p in built.parameters() if p.grad is not None), *built.buffers()])
    for plain, again in zip(*results, strict=True):
        torch.testing.assert_close(plain, again)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_hands_the_state_up(checkpointed: bool) -> None:
    config = TransformerXLConfig(
        vocab_size=11, num_layers=3, dim=8, num_heads=2, head_dim=4, hidden_dim=8, num_experts=4, top_k=2,
        router="recurrent:width=3|smoe|recurrent:width=3", checkpoint_activations=checkpointed, dropout=0.0,
    )  # fmt: skip
    model = TransformerXL(config)
    tokens = torch.arange(10).view(2, 5)
    with record_routing(model) as records:
        model(tokens, tokens).loss.backward()
    first, middle, last = (records[f"layers.{i}.moe"] for i in range(3))
    assert first.above["gru-3"] is not None
    assert torch.equal(first.above["gru-3"], middle.above["gru-3"])
    assert not torch.equal(first.above["gru-3"], last.above["gru-3"])
    state = model.layers[2].moe.router.score.cell.state.weight
    assert state.grad is not None
    assert state.grad.any()  # only the last layer has a state below


def test_x_moes_layer_in_a_model() -> None:
    """One BASE-style layer after half of the layers: with zero weights it changes nothing."""
    shape = {"vocab_size": 11, "num_layers": 2, "dim": 8, "num_heads": 2, "head_dim": 4, "hidden_dim": 8,
             "num_experts": 4, "top_k": 1, "router": "xmoe", "moe_layers": "after:1"}  # fmt: skip
    model = TransformerXL(TransformerXLConfig(**shape, experts="base", dropout=0.0))
    tokens = torch.randint(11, (2, 7))
    assert isinstance(model.inserted.moe.experts, BaseExperts)
    assert model.inserted.feed_forward_norm is None
    hidden = torch.randn(2, 7, 8)
    assert torch.equal(model.inserted.moe(hidden), hidden)
    model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
    assert model.inserted.moe.experts.sublayers[0].w_out.grad.abs().sum() > 0
    plain = TransformerXL(TransformerXLConfig(**shape))
    table = parameter_table(model)
    assert table.experts == 4 * 3 * (8 * 8 + 8 + 8 * 8 + 8 + 2 * 8)
    assert inference_flops(model, 1) - inference_flops(plain, 1) == 2 * 10 * 128 * 2 * (2 * 8 * 8)


def test_a_model_with_shared_experts_and_its_cost() -> None:
    sizes = {"num_layers": 1, "dim": 16, "num_heads": 2, "head_dim": 4, "hidden_dim": 12, "num_experts": 4}
    plain, more, dense = (
        TransformerXL(TransformerXLConfig(50, **sizes, **options))
        for options in ({}, {"shared_experts": 2, "shared_gate": True}, {"shared_experts": 2, "router": "dense"})
    )
    with pytest.raises(ValueError, match="shared_gate=True needs shared_experts"):
        TransformerXLConfig(9, shared_gate=True)
    shared = 2 * 24 * 16 + 24 + 16 + 16
    assert parameter_table(more).experts - parameter_table(plain).experts == shared
    protocol = Protocol(batch=2, length=3, memory=5)
    difference = inference_flops(more, 1, protocol) - inference_flops(plain, 1, protocol)
    assert difference == 2 * 6 * (2 * 24 * 16 + 16)
    assert dense.layers[0].feed_forward.w_in.shape == (6 * 12, 16)
    assert isinstance(more.layers[0].moe.shared.gate, nn.Parameter)
    assert torch.equal(plain.layers[0].moe.experts.w_in, more.layers[0].moe.experts.w_in)


def test_each_layer_of_a_model_draws_its_own_visible_experts() -> None:
    config = DecoderConfig(
        vocab_size=64, num_layers=2, dim=16, num_heads=2, hidden_dim=8, num_experts=4, top_k=1, router="mask:visible=1"
    )  # fmt: skip
    first, second = (one.router.score.first for one in Decoder(config).modules() if isinstance(one, MoE))
    assert not torch.equal(first, second)
