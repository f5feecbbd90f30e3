"""The Transformer-XL: against the equations, and its promises about memory, causality, padding and initial weights."""

import math

import pytest
import torch
import torch.nn.functional as F

from pointsman import AttentionTrace, MoE, RoutingContext, freeze, record_routing, set_top_k
from pointsman.routers.frame.stages import Mixer
from pointsman_lab.models.memory import Memory
from pointsman_lab.models.transformer_xl import TransformerXL, TransformerXLConfig

VOCABULARY = 31


def build(**changes) -> TransformerXL:
    settings = {
        "vocab_size": VOCABULARY, "num_layers": 3, "dim": 16, "num_heads": 2, "head_dim": 6, "hidden_dim": 12,
        "num_experts": 4, "dropout": 0.0,
    }  # fmt: skip
    return TransformerXL(TransformerXLConfig(**{**settings, **changes}))


def loud(model: TransformerXL) -> TransformerXL:
    """Weights large enough that every part matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(3.0 if "norm" not in name else 1.0)
    return model


def text(batch: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


class InformedMixer(Mixer):
    """A mixer that uses all that a context offers: each token takes the mean of earlier tokens' probabilities,
    weighted by the first head's attention; it carries probabilities on, and checks the trace against its own output."""

    needs = frozenset({"attention"})

    def forward(self, probs, hidden, context: RoutingContext):
        trace = context.attention
        assert isinstance(trace, AttentionTrace)
        length, keys = trace.query.shape[2], trace.key.shape[2]
        bias = torch.cat([trace.bias(start, start + 1) for start in range(length)], 2)
        scores = trace.query @ trace.key.transpose(-1, -2) * trace.scale + bias
        after = torch.ones(length, keys, dtype=torch.bool).triu(keys - length + 1)
        attention = scores.masked_fill(after, -math.inf).softmax(-1)
        output = torch.einsum("bhts,bhsd,hdo->bto", attention, trace.value, trace.out_weight)
        torch.testing.assert_close(output, trace.output, rtol=1e-4, atol=1e-5)
        known = probs if context.past is None else torch.cat([context.past["probs"], probs], 1)
        return attention[:, 0] @ known, {"probs": known}, {}


def with_mixers(model: TransformerXL) -> TransformerXL:
    for module in model.modules():
        if hasattr(module, "moe") and module.moe is not None:
            module.moe.router.mix = InformedMixer()
            module.moe.router.needs = InformedMixer.needs
    return model


# --- the equations -------------------------------------------------------------------------------------------------


def reference(model: TransformerXL, tokens: torch.Tensor, memories: list[torch.Tensor]) -> torch.Tensor:
    """Logits in float64 by the equations of Transformer-XL's section 3.3, token by token, post-norm, k experts."""
    config = model.config
    state = {name: value.double() for name, value in model.state_dict().items()}
    heads, width = config.num_heads, config.head_dim
    hidden = state["embedding.weight"][tokens] * config.dim**0.5
    u, w = state["position_encoding.content_bias"], state["position_encoding.position_bias"]

    def norm(x, name):
        return F.layer_norm(x, (config.dim,), state[f"{name}.weight"], state[f"{name}.bias"])

    def sinusoid(distance):
        angles = distance * torch.tensor(
            [10000 ** (-2 * i / config.dim) for i in range(config.dim // 2)], dtype=torch.float64
        )
        return torch.cat([angles.sin(), angles.cos()])

    for index in range(config.num_layers):
        name = f"layers.{index}"
        joined = torch.cat([memories[index].double(), hidden], 1)
        memory = joined.shape[1] - hidden.shape[1]
        qkv = joined @ state[f"{name}.attention.qkv.weight"].T
        q, k, v = (part.unflatten(-1, (heads, width)) for part in qkv.chunk(3, -1))
        rows = []
        for i in range(hidden.shape[1]):
            scores = []
            for j in range(i + memory + 1):
                r = (state[f"{name}.attention.position.weight"] @ sinusoid(i + memory - j)).view(heads, width)
                query = q[:, i + memory]
                scores.append((((query + u) * k[:, j]).sum(-1) + ((query + w) * r).sum(-1)) / width**0.5)
            attention = torch.stack(scores, -1).softmax(-1)
            rows.append(torch.einsum("bhj,bjhd->bhd", attention, v[:, : i + memory + 1]).flatten(1))
        mixed = torch.stack(rows, 1) @ state[f"{name}.attention.output.weight"].T
        hidden = norm(hidden + mixed, f"{name}.attention_norm")
        logits = hidden @ state[f"{name}.moe.router.score.weight"].T + state[f"{name}.moe.router.score.bias"]
        values, experts = logits.topk(config.top_k)
        weights = values.softmax(-1)
        combined = torch.zeros_like(hidden)
        for e in range(config.num_experts):
            p = {part: state[f"{name}.moe.experts.{part}"][e] for part in ("w_in", "b_in", "w_out", "b_out")}
            result = torch.relu(hidden @ p["w_in"].T + p["b_in"]) @ p["w_out"].T + p["b_out"]
            combined += (weights * (experts == e)).sum(-1, keepdim=True) * result
        hidden = norm(hidden + combined, f"{name}.feed_forward_norm")
    return hidden @ state["embedding.weight"].T + state["embedding.bias"]


@pytest.mark.parametrize("memory_length", [0, 5])
def test_logits_and_gradients_equal_the_equations(memory_length):
    model = loud(build()).double()
    tokens = text()
    first = model(tokens[:, :5], memory_length=memory_length)
    got = model(tokens[:, 5:], None, first.memory, memory_length=memory_length).logits
    expected = reference(model, tokens[:, 5:], list(first.memory.hidden))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_gradients_equal_the_equations():
    model = loud(build(num_layers=2)).double()
    tokens = text()
    parameters = dict(model.named_parameters())
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    got = torch.autograd.grad(loss, list(parameters.values()))
    model.state_dict = lambda: parameters  # the reference then computes on the parameters themselves
    empty = [torch.zeros(2, 0, 16)] * 2
    logits = reference(model, tokens[:, :-1], empty)
    expected_loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(expected_loss, list(parameters.values()))
    for name, mine, exact in zip(parameters, got, expected, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-8, atol=1e-11, msg=name)


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("layout", ["all", "every:2", "after:2"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 7]])
def test_segments_with_long_memory_equal_one_pass(pre_norm, layout, mixed, cuts):
    model = loud(build(pre_norm=pre_norm, moe_layers=layout)).eval()
    if mixed:
        with_mixers(model)
    tokens = text()
    with torch.no_grad():
        whole = model(tokens).logits
        memory: Memory | None = None
        parts = []
        for segment in tokens.tensor_split(cuts, dim=1):
            output = model(segment, None, memory, memory_length=32)
            memory = output.memory
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=2e-5, atol=2e-5)
    assert memory is not None
    assert memory.length == 9
    assert bool(memory.carries) == mixed


def test_memory_holds_the_detached_inputs_of_each_layer():
    model = build()
    tokens = text(length=6)
    memory = model(tokens, memory_length=4).memory
    assert [tuple(hidden.shape) for hidden in memory.hidden] == [(2, 4, 16)] * 3
    torch.testing.assert_close(memory.hidden[0], model.embedding.embed(tokens)[:, 2:])
    assert not any(hidden.requires_grad for hidden in memory.hidden)
    grown = model(tokens[:, :1], None, memory, memory_length=4).memory
    torch.testing.assert_close(grown.hidden[2][:, :3], memory.hidden[2][:, 1:])
    assert model(tokens, None, memory).memory.length == 0


def test_memory_survives_a_round_trip_through_plain_tensors():
    model = with_mixers(build(moe_layers="after:2"))
    mask = torch.ones(2, 6, dtype=torch.bool)
    memory = model(text(length=6), memory_length=4, padding_mask=mask).memory
    back = Memory.from_tensors(memory.to("cpu").to_tensors())
    assert back.length == 4
    assert back.carries["inserted"]["probs"].shape == (2, 4, 4)
    assert back.to_tensors().keys() == memory.to_tensors().keys()
    for name, tensor in back.to_tensors().items():
        assert torch.equal(tensor, memory.to_tensors()[name])


def test_memory_of_another_model_or_batch_is_refused():
    model = build()
    memory = model(text(), memory_length=4).memory
    with pytest.raises(ValueError, match="3 sequences"):
        model(text(batch=3), None, memory)
    with pytest.raises(ValueError, match="2 layers"):
        build(num_layers=2)(text(), None, memory)


# --- causality, batches, padding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ["smoe", "hyperrouter", "smoe:capacity=1.0", "switch", "dense"])
def test_later_tokens_and_other_sequences_change_nothing(router):
    model = loud(build(router=router)).eval()
    tokens = text()
    before = model(tokens).logits
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % VOCABULARY
    after = model(changed).logits
    torch.testing.assert_close(after[0, :5], before[0, :5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after[1], before[1], rtol=1e-5, atol=1e-5)
    assert (after[0, 5:] - before[0, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_real_tokens(side, mixed):
    model = loud(build()).eval()
    short = text(batch=1, length=6)
    pad = torch.full((1, 3), 7)
    tokens = torch.cat([pad, short] if side == "left" else [short, pad], 1)
    mask = torch.zeros(1, 9, dtype=torch.bool)
    real = slice(3, 9) if side == "left" else slice(0, 6)
    mask[:, real] = True
    rest = text(batch=1, length=4, seed=1)
    first = model(tokens, padding_mask=mask, memory_length=16)
    alone = model(short, memory_length=16)
    torch.testing.assert_close(first.logits[:, real], alone.logits, rtol=2e-5, atol=2e-5)
    assert torch.isfinite(first.logits).all()
    if side == "left":  # right padding leaves a gap in the positions
        with_padding = model(rest, None, first.memory, memory_length=16).logits
        torch.testing.assert_close(
            with_padding, model(rest, None, alone.memory, memory_length=16).logits, rtol=2e-5, atol=2e-5
        )
    with record_routing(model) as records:
        model(tokens, padding_mask=mask)
    assert ((records["layers.0.moe"].experts == -1).all(-1) == ~mask[0]).all()


def test_padded_and_negative_targets_count_nothing():
    model = build().eval()
    tokens, targets = text(), text(seed=1)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 7:] = False
    targets[1, 2] = -100
    losses = model(tokens, targets, padding_mask=mask, reduction="none").loss
    counted = mask & (targets >= 0)
    assert (losses[~counted] == 0).all()
    logits = model(tokens, padding_mask=mask).logits
    expected = F.cross_entropy(logits[counted], targets[counted])
    torch.testing.assert_close(model(tokens, targets, padding_mask=mask).loss, expected)
    torch.testing.assert_close(losses.sum() / counted.sum(), expected)


@pytest.mark.parametrize(
    ("flag", "told", "allow"),
    [("causal", "", "allow_non_causal"), ("training_causal", "in training.*", "allow_non_causal_training")],
)
def test_a_router_that_sees_later_tokens_is_refused_by_name(monkeypatch, flag, told, allow):
    monkeypatch.setattr(InformedMixer, flag, False)
    from pointsman.routers.frame.registry import MIXERS, register_mixer

    register_mixer("informed", paper="none")(lambda site: InformedMixer())
    try:
        with pytest.raises(ValueError, match=rf"'smoe\+informed'.*{told}{allow}=True"):
            build(router="smoe+informed")
        router = build(router="smoe+informed", **{allow: True}).layers[0].moe.router
        assert router.causal == (flag != "causal")
    finally:
        del MIXERS["informed"]


# --- initial weights -----------------------------------------------------------------------------------------------

ROUTERS = ["smoe", "smoe-dropout", "hyperrouter", "frozen-temperature", "switch", "thor", "smoe|hyperrouter"]


def test_initial_weights_outside_routers_agree():
    first = {name: value for name, value in build().named_parameters() if ".router." not in name}
    for router in ROUTERS[1:]:
        torch.manual_seed(99)
        other = {name: value for name, value in build(router=router).named_parameters() if ".router." not in name}
        assert other.keys() == first.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(build(seed=1).embedding.weight, first["embedding.weight"])


def test_building_a_model_leaves_the_default_generator_as_it_was():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build(router="hyperrouter")
    assert torch.equal(torch.get_rng_state(), before)


def test_routers_are_drawn_by_seed_and_layer_and_initialise_themselves():
    model, again = build(router="hyperrouter", dim=64), build(router="hyperrouter", dim=64)
    scores = [layer.moe.router.score for layer in model.layers]
    assert torch.equal(scores[0].embedding, again.layers[0].moe.router.score.embedding)
    assert not torch.equal(scores[0].embedding, scores[1].embedding)
    assert 0.7 < scores[0].embedding.std() < 1.3  # N(0, 1), not N(0, 0.02)
    shared = build(router="hyperrouter:share=true")
    assert shared.layers[0].moe.router.score.hypernetwork is shared.layers[2].moe.router.score.hypernetwork


def test_initial_values_are_the_published_ones():
    model = build(dim=64, hidden_dim=96, num_heads=8, head_dim=32)
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if "norm" in name and last == "weight":
            assert abs(parameter.mean() - 1) < 0.02, name
            assert 0.01 < parameter.std() < 0.03, name
        elif last in ("bias", "b_in", "b_out"):
            assert not parameter.any(), name
        else:
            assert abs(parameter.std() - 0.02) < 0.004, name


def test_dense_starts_with_the_numbers_of_the_experts():
    sparse, dense = build().double().eval(), build(router="dense").double().eval()
    set_top_k(sparse, 4)
    hidden = torch.randn(5, 16, dtype=torch.float64)
    experts = sparse.layers[1].moe.experts
    expected = sum(
        torch.relu(hidden @ experts.w_in[e].T + experts.b_in[e]) @ experts.w_out[e].T + experts.b_out[e]
        for e in range(4)
    )
    torch.testing.assert_close(dense.layers[1].feed_forward(hidden), expected)


# --- dropout, options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("router", "rate"), [("dense", 0.0), ("dense-dropout", 0.1)])
def test_dense_baselines_set_the_dropout_of_their_feed_forward_layers(router, rate):
    model = build(router=router, dropout=0.3, moe_layers="every:2")
    for layer in model.layers:
        assert (layer.feed_forward.dropout, layer.feed_forward_dropout, layer.dropout) == (rate, rate, 0.3)
    mixed = build(dropout=0.3, moe_layers="every:2").layers
    assert (mixed[1].feed_forward.dropout, mixed[0].moe.experts.dropout) == (0.3, 0.3)


def test_dropout_acts_in_training_only_and_follows_the_generator():
    model = build(dropout=0.3, attention_dropout=0.2)
    tokens = text()

    def loss() -> torch.Tensor:
        torch.manual_seed(4)
        return model(tokens[:, :-1], tokens[:, 1:]).loss

    assert torch.equal(loss(), loss())
    assert not torch.equal(loss(), model(tokens[:, :-1], tokens[:, 1:]).loss)
    model.eval()
    assert torch.equal(loss(), model(tokens[:, :-1], tokens[:, 1:]).loss)


@pytest.mark.parametrize("mixed", [False, True])
def test_activation_checkpointing_changes_no_gradient(mixed):
    tokens = text()
    gradients = []
    for checkpointed in (False, True):
        changes = {"router": "smoe:balance=0.1", "checkpoint_activations": checkpointed, "moe_layers": "after:2"}
        model = build(dropout=0.0 if mixed else 0.2, **changes)
        if mixed:
            with_mixers(model)
        torch.manual_seed(3)
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def test_forward_hooks_on_layers_see_outputs_and_routings():
    model, seen = build(), []
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers:
        layer.register_forward_hook(lambda module, args, output: seen.append((module, output)))
    model(text())
    assert [module for module, _ in seen] == layers
    assert all(
        output.shape == (2, 9, model.config.dim) and routing.experts.shape[0] == 18 for _, (output, routing) in seen
    )


def test_roles_can_be_frozen_and_layers_are_named():
    model = build(moe_layers="after:2")
    with record_routing(model) as records:
        model(text())
    assert list(records) == ["inserted.moe"]
    with record_routing(build()) as records:
        pass
    freeze(model, "attention", "embedding", "norm", "feed-forward", "experts", "router")
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_no_score_matrix_is_kept():
    model = build(num_layers=1, dim=8, num_heads=4, head_dim=2, hidden_dim=4)
    tokens = text(batch=1, length=129)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        memory = model(tokens[:, :-1], memory_length=128).memory
        model(tokens[:, :-1], tokens[:, 1:], memory)
    assert max(kept) < 128 * 256


@pytest.mark.parametrize("router", ["smoe", "hyperrouter", "dense"])
def test_bfloat16_autocast_stays_near_float32(router):
    model = build(router=router)
    tokens = text()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens[:, :-1], tokens[:, 1:], memory_length=8).loss
    loss.backward()
    assert all(parameter.grad is None or parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert abs(loss - model(tokens[:, :-1], tokens[:, 1:]).loss) < 0.02


def test_a_few_steps_learn():
    model = build(pre_norm=True, dropout=0.1, hidden_dim=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.arange(24).repeat(2, 1) % 5
    for _ in range(80):
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile meets its own
def test_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    model = build(num_layers=1, router="hyperrouter")
    compiled = torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=True)
    memory = None
    for segment in range(2):
        tokens, results = text(seed=segment), []
        for run in (model, compiled):
            output = run(tokens, tokens.roll(-1, 1), memory, memory_length=9)
            gradients = torch.autograd.grad(output.loss, list(model.parameters()), allow_unused=True)
            results.append([output.loss, *output.memory.hidden, *gradients])
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-6)
        memory = output.memory


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_padding_mask_is_bool(dtype):
    with pytest.raises(ValueError, match=f"padding_mask must be bool, True for a real token, got {dtype}"):
        build()(text(), padding_mask=torch.ones(2, 9, dtype=dtype))


def test_padding_in_half_precision():
    model, mask = build(), torch.ones(2, 9, dtype=torch.bool)
    mask[1, 4:] = False
    expected = model(text(), padding_mask=mask).logits
    got = model.half()(text(), padding_mask=mask).logits.float()
    torch.testing.assert_close(got[mask], expected[mask], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("mixer", "open_eyed"), [("similarity", True), ("uniform", True), ("attention", False)])
def test_allow_non_causal_shows_mixers_the_whole_segment(mixer, open_eyed):
    """Similarity then sees later tokens; the attention's posterior what the attention saw, which stays causal."""
    tokens = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 20
    for allowed in (False, True):
        model = build(router=f"smoe+{mixer}", allow_non_causal=allowed).eval()
        with torch.no_grad(), record_routing(model) as records:
            model(tokens)
            first = {name: routing.probs.view(2, 9, -1)[:, :-1] for name, routing in records.items()}
            model(changed)
            second = {name: routing.probs.view(2, 9, -1)[:, :-1] for name, routing in records.items()}
        same = [torch.allclose(first[name], second[name], atol=1e-6) for name in first]
        assert same == [not (allowed and open_eyed)] * len(first)
