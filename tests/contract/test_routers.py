"""Every registered router, bare and mixed, through one table of promises."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pointsman import (
    AttentionTrace,
    MoE,
    Router,
    Routing,
    RoutingContext,
    build_router,
    list_routers,
    losses,
    materialize,
    record_routing,
    set_loss_scale,
    set_top_k,
    step_end,
)
from pointsman.routers import registry
from pointsman.routers.registry import list_mixers
from pointsman.routers.stages import Mixer

DIM, EXPERTS, BATCH, LENGTH = 24, 6, 3, 11
NON_CAUSAL = [f"smoe+{name}" for name in ("attention:heads=lowest-entropy-sequence",)]
SPECS = [
    *list_routers(),
    *(f"{router}+{mixer}" for router in list_routers() for mixer in list_mixers()),
    "smoe:gate=sigmoid",
    "smoe:capacity=1.0",
    "smoe:renormalize=false",
    "hyperrouter:share=true:embed_dim=5:hyper_dim=7",
    "xmoe:gate=sigmoid",
    "xmoe:routing_dim=full:normalize=false",
    "smoe+similarity:source=input",
    "smoe+similarity:source=attention",
    "smoe+similarity:learned=true",
    "smoe+similarity:neighbours=surer",
    "smoe+attention:heads=all",
    "smoe+attention:neighbours=surer",
    *NON_CAUSAL,
]


def trace(hidden: Tensor, heads: int = 2, width: int = 5) -> AttentionTrace:
    """An attention whose every token depends on that token of `hidden` alone (the rest is the mixer's to keep)."""
    generator = torch.Generator().manual_seed(7)
    make = nn.functional.linear

    def project(rows: int) -> Tensor:
        return torch.randn(rows, hidden.shape[-1], generator=generator).to(hidden.dtype) / 5

    query, key, value = (
        make(hidden, project(heads * width)).unflatten(-1, (heads, width)).transpose(1, 2) for _ in range(3)
    )
    out_weight = torch.randn(heads, width, hidden.shape[-1], generator=generator).to(hidden.dtype) / 5
    scores = (query @ key.transpose(-1, -2) * width**-0.5).masked_fill(
        torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).triu(1), float("-inf")
    )
    output = torch.einsum("bhtd,hdo->bto", scores.softmax(-1) @ value, out_weight)
    return AttentionTrace(query, key, value, out_weight, output, width**-0.5)


def piece(whole: AttentionTrace, start: int, stop: int) -> AttentionTrace:
    """What the attention of tokens `start:stop`, with all before them in memory, would show."""
    return replace(
        whole,
        query=whole.query[:, :, start:stop],
        key=whole.key[:, :, :stop],
        value=whole.value[:, :, :stop],
        output=whole.output[:, start:stop],
    )


def context_for(router: Router, hidden: Tensor, **fields: object) -> RoutingContext:
    needs = router.needs
    context = RoutingContext(
        attention=trace(hidden) if "attention" in needs else None,
        token_ids=torch.arange(hidden.shape[1]).expand(hidden.shape[:2]) if "token_ids" in needs else None,
    )
    return replace(context, **fields)


def build(spec: str, **options: object) -> Router:
    torch.manual_seed(1)
    return build_router(spec, dim=DIM, num_experts=EXPERTS, **options)


def route(router: Router, hidden: Tensor, seed: int = 3, **fields: object) -> Routing:
    torch.manual_seed(seed)
    return router(hidden, context_for(router, hidden, **fields))


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(5))


def is_softmax(spec: str) -> bool:
    return "sigmoid" not in spec


def test_shapes_and_sums_for_every_k(spec: str, hidden: Tensor) -> None:
    router = build(spec).eval()
    for k in range(1, EXPERTS + 1):
        set_top_k(router, k)
        routing = route(router, hidden)
        tokens = BATCH * LENGTH
        assert routing.experts.shape == routing.weights.shape == (tokens, k)
        assert routing.experts.dtype == torch.int64
        assert routing.probs.shape == routing.logits.shape == (tokens, EXPERTS)
        assert routing.experts.max() < EXPERTS
        assert routing.experts.min() >= (-1 if "capacity" in spec else 0)
        for row in routing.experts:
            chosen = row[row >= 0]
            assert chosen.unique().numel() == chosen.numel()
        if is_softmax(spec):
            torch.testing.assert_close(routing.probs.sum(-1), torch.ones(tokens))
        assert (routing.probs >= 0).all()
        if getattr(router.select, "renormalize", False) and "capacity" not in spec:
            torch.testing.assert_close(routing.weights.sum(-1), torch.ones(tokens))


def test_every_k_with_all_experts_means_all(spec: str, hidden: Tensor) -> None:
    router = build(spec, top_k=EXPERTS).eval()
    set_top_k(router, EXPERTS)
    if "capacity" in spec:
        pytest.skip("capacity drops assignments")
    experts = route(router, hidden).experts
    assert torch.equal(experts.sort(-1).values, torch.arange(EXPERTS).expand_as(experts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_computes_in_at_least_float32(spec: str, hidden: Tensor, dtype: torch.dtype) -> None:
    router = build(spec).to(dtype).eval()
    routing = route(router, hidden.to(dtype))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert routing.logits.dtype == routing.probs.dtype == routing.weights.dtype == expected
    if dtype in (torch.bfloat16, torch.float16):
        assert all(buffer.dtype == torch.float32 for buffer in router.buffers() if buffer.is_floating_point())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_only_raised(spec: str, dtype: torch.dtype) -> None:
    router = build(spec)
    low = torch.randn(2, 150, DIM).to(dtype).requires_grad_()
    high = low.detach().float().requires_grad_()
    context = context_for(router, high.detach())
    results = []
    for hidden in (low, high):
        torch.manual_seed(3)
        logits = router(hidden, context).logits
        wanted = [hidden, *(parameter for parameter in router.parameters() if parameter.requires_grad)]
        gradient = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(logits, wanted, gradient, allow_unused=True) if logits.requires_grad else ()
        results.append([logits.detach(), *gradients])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-2 if one.dtype == dtype else 1e-5, atol=1e-4)


def test_autocast_leaves_the_routing_alone(spec: str, hidden: Tensor) -> None:
    router = build(spec).eval()
    context = context_for(router, hidden)
    torch.manual_seed(3)
    plain = router(hidden, context)
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = router(hidden, context)
    assert torch.equal(plain.experts, cast.experts)
    assert torch.equal(plain.weights, cast.weights)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 7), (5, 1), (2, 33), (2, 0), (0, 5)])
def test_odd_sizes(spec: str, batch: int, length: int) -> None:
    router = build(spec)
    routing = route(router, torch.randn(batch, length, DIM))
    assert routing.experts.shape == (batch * length, router.top_k)


def test_one_sequence_without_batch_dimension(spec: str, hidden: Tensor) -> None:
    router = build(spec).eval()
    if "attention" in router.needs:
        pytest.skip("an attention trace has a batch dimension")
    torch.manual_seed(3)
    flat = router(hidden[0])
    assert torch.equal(flat.experts, route(router, hidden[:1]).experts)


def test_causal_flag_is_true_to_the_routing(spec: str, hidden: Tensor) -> None:
    """Perturbing token t changes nothing before t; a router that fails this may not call itself causal."""
    router = build(spec).eval()
    if router.stochastic:
        pytest.skip("draws at random")
    changed = False
    before = route(router, hidden)
    for t in range(1, LENGTH):
        other = hidden.clone()
        other[:, t:] = 3 * torch.randn(BATCH, LENGTH - t, DIM)
        after = route(router, other)
        for name in ("experts", "weights", "probs", "logits"):
            left = getattr(before, name).view(BATCH, LENGTH, -1)[:, :t]
            right = getattr(after, name).view(BATCH, LENGTH, -1)[:, :t]
            same = torch.equal(left, right) if left.dtype == torch.int64 else torch.allclose(left, right, atol=1e-6)
            if router.causal:
                assert same, f"{name} before token {t} changed"
            changed = changed or not same
    if not router.causal:
        assert changed, "declares itself non-causal, yet nothing moved"
    assert router.causal == (spec not in NON_CAUSAL)


@pytest.mark.parametrize("cuts", [list(range(1, LENGTH + 1)), [4, 5, LENGTH]])
def test_a_causal_router_routes_pieces_as_the_whole(spec: str, hidden: Tensor, cuts: list[int]) -> None:
    """A token at a time, or in segments, with what each piece carries on."""
    router = build(spec).eval()
    if router.stochastic or not router.causal or "capacity" in spec:
        pytest.skip("draws at random, sees the whole sequence, or counts a share of its length")
    context = context_for(router, hidden)
    together, start, past = router(hidden, context), 0, None
    for stop in cuts:
        attention = None if context.attention is None else piece(context.attention, start, stop)
        ids = None if context.token_ids is None else context.token_ids[:, start:stop]
        part = router(hidden[:, start:stop], RoutingContext(attention=attention, token_ids=ids, past=past))
        for name in ("probs", "logits"):
            expected = getattr(together, name).view(BATCH, LENGTH, -1)[:, start:stop].flatten(0, 1)
            torch.testing.assert_close(getattr(part, name), expected, atol=1e-6, rtol=1e-5)
        start, past = stop, part.carry


class Cheat(Mixer):
    """A mixer that calls itself causal, batch invariant and deterministic, and is not: `kind` says in what."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(
        self, probs: Tensor, hidden: Tensor, context: RoutingContext
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        count = torch.arange(1, probs.shape[1] + 1, dtype=probs.dtype)[:, None]
        if self.kind == "looks ahead":
            mixed = probs.flip(1).cumsum(1).flip(1) / count.flip(0)
        elif self.kind == "sees other sequences":
            mixed = probs.mean(0, keepdim=True).expand_as(probs)
        elif self.kind == "draws":
            mixed = torch.softmax(torch.randn_like(probs), -1)
        else:  # forgets: causal in a segment, but nothing is carried on
            mixed = probs.cumsum(1) / count
        return mixed, {}, {}


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("looks ahead", "test_causal_flag_is_true_to_the_routing"),
        ("forgets", "test_a_causal_router_routes_pieces_as_the_whole"),
        ("sees other sequences", "test_batch_invariant_flag_is_true_to_the_routing"),
        ("draws", "test_stochastic_flag_is_true_to_the_routing"),
    ],
)
def test_a_mixer_with_a_false_flag_fails_here(
    kind: str, check: str, hidden: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of specs above is the registry's: whoever registers such a mixer does not pass."""
    monkeypatch.setitem(registry._MIXERS, "cheat", registry.Entry("cheat", lambda site: Cheat(kind), "", ""))
    assert "cheat" in list_mixers()
    cuts = {"cuts": [4, LENGTH]} if "pieces" in check else {}
    with pytest.raises(AssertionError):
        globals()[check]("smoe+cheat", hidden, **cuts)


def test_batch_invariant_flag_is_true_to_the_routing(spec: str, hidden: Tensor) -> None:
    router = build(spec).eval()
    if router.stochastic:
        pytest.skip("draws at random")
    other = hidden.clone()
    other[1:] = 3 * torch.randn(BATCH - 1, LENGTH, DIM)
    left, right = route(router, hidden), route(router, other)
    if not router.batch_invariant:
        assert not torch.equal(left.probs[:LENGTH], right.probs[:LENGTH])
        return
    assert torch.equal(left.experts[:LENGTH], right.experts[:LENGTH])
    torch.testing.assert_close(left.weights[:LENGTH], right.weights[:LENGTH])


def test_stochastic_flag_is_true_to_the_routing(spec: str, hidden: Tensor) -> None:
    router = build(spec).eval()
    same = torch.equal(route(router, hidden, seed=3).experts, route(router, hidden, seed=4).experts)
    assert same != router.stochastic


def test_padding_neither_informs_nor_counts(spec: str, hidden: Tensor) -> None:
    router = build(spec)
    if router.stochastic:
        pytest.skip("draws at random")
    router.balance, router.z_loss = 0.01, 0.001
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[0, 8:] = False
    mask[2, 5:] = False
    other = torch.where(mask[..., None], hidden, 5 * torch.randn_like(hidden))
    left, right = route(router, hidden, padding_mask=mask), route(router, other, padding_mask=mask)
    real = mask.reshape(-1)
    assert (left.experts[~real] == -1).all()
    assert (left.weights[~real] == 0).all()
    assert torch.equal(left.experts, right.experts)
    torch.testing.assert_close(left.weights, right.weights)
    for name in left.losses:
        torch.testing.assert_close(left.losses[name], right.losses[name])
    if router.batch_invariant:
        alone = route(router, hidden[:1, :8])
        torch.testing.assert_close(left.weights[:8], alone.weights)


def test_gradients_where_they_should_be(spec: str, hidden: Tensor) -> None:
    """The router's trainable parameters all get a gradient through the weights; nothing else in it can train."""
    torch.manual_seed(1)
    layer = MoE(DIM, 16, EXPERTS, router=spec, top_k=3)
    set_top_k(layer, 3)
    x = hidden.clone().requires_grad_()
    torch.manual_seed(3)
    output = layer(x, context_for(layer.router, x))
    output.square().mean().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    for name, parameter in layer.router.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        if name == "score.bias":  # a common shift cancels
            continue
        assert parameter.grad.abs().sum() > 0, name
    layer.requires_grad_(True)
    assert not any(buffer.requires_grad for buffer in layer.router.buffers())


def test_checkpointing_changes_nothing(spec: str, hidden: Tensor) -> None:
    def run(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(1)
        layer = MoE(DIM, 16, EXPERTS, router=spec, dropout=0.1)
        x = hidden.clone().requires_grad_()
        torch.manual_seed(3)
        context = context_for(layer.router, x.detach())
        output = checkpoint(layer, x, context, use_reentrant=False) if checkpointed else layer(x, context)
        output.square().sum().backward()
        step_end(layer)
        return [output, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None), *layer.router.buffers()]

    for plain, again in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(plain, again)


def test_state_dict_round_trip(spec: str, hidden: Tensor) -> None:
    router = build(spec).eval()
    torch.manual_seed(99)
    other = build_router(spec, dim=DIM, num_experts=EXPERTS).eval()
    if list(router.parameters()) or list(router.buffers()):
        with torch.no_grad():
            route(other, hidden)  # fills whatever it caches
    other.load_state_dict(router.state_dict())
    with torch.no_grad():
        left, right = route(router, hidden), route(other, hidden)
    assert torch.equal(left.experts, right.experts)
    assert torch.equal(left.weights, right.weights)


def test_losses_are_one_at_balance_and_attached(spec: str, hidden: Tensor) -> None:
    layer = MoE(DIM, 16, EXPERTS, router=spec)
    layer.router.balance = 0.5
    context = context_for(layer.router, hidden)
    layer.requires_grad_(False)
    for parameter in layer.router.parameters():
        parameter.requires_grad_(True)
    output = layer(hidden.clone().requires_grad_(), context)
    values = losses(layer)[""]
    assert values["balance"] > 0
    set_loss_scale(layer, 0.0)
    (output.sum() * 0).backward()
    assert all(p.grad is None or not p.grad.any() for p in layer.router.parameters())
    assert layer.loss_scale == 0


def test_what_follows_a_layer_may_work_in_place(spec: str, hidden: Tensor) -> None:
    layer = MoE(DIM, 16, EXPERTS, router=spec)
    layer.router.balance = 0.5
    gradients = []
    for in_place in (False, True):
        layer.zero_grad()
        torch.manual_seed(3)
        output = layer(hidden, context_for(layer.router, hidden))
        (output.add_(hidden) if in_place else output + hidden).square().sum().backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in layer.parameters()])
    for left, right in zip(*gradients, strict=True):
        assert (left is None and right is None) or torch.equal(left, right)


def test_hooks_on_the_experts_see_an_output_that_stays(spec: str, hidden: Tensor) -> None:
    def doubled(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return 2 * output.tanh()  # which keeps its result for backward

    layer = MoE(DIM, 16, EXPERTS, router=spec)
    layer.router.balance = 0.5
    layer.experts.register_forward_hook(doubled)
    seen: list[Tensor] = []
    layer.experts.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    layer(hidden.clone().requires_grad_(), context_for(layer.router, hidden)).square().sum().backward()
    assert len(seen) == 1
    assert layer.experts.w_in.grad is not None


def test_record_routing(spec: str, hidden: Tensor) -> None:
    model = nn.ModuleDict({"block": MoE(DIM, 16, EXPERTS, router=spec)})
    context = context_for(model["block"].router, hidden)
    with record_routing(model) as records:
        model["block"](hidden, context)
    assert list(records) == ["block"]
    assert not records["block"].weights.requires_grad
    seen = []
    with record_routing(model, lambda name, routing, given: seen.append((name, given))):
        model["block"](hidden, context)
    model["block"](hidden, context)
    assert seen == [("block", context)]


def test_materialize_keeps_the_logits_or_refuses_by_name(spec: str, hidden: Tensor) -> None:
    model = nn.ModuleDict({"block": MoE(DIM, 16, EXPERTS, router=spec)}).eval()
    router = model["block"].router
    before = route(router, hidden)
    if spec.startswith(("xmoe", "thor")):
        with pytest.raises(ValueError, match="block"):
            materialize(model)
        assert model["block"].router.spec == spec
        return
    materialize(model)
    after = route(router, hidden)
    torch.testing.assert_close(after.logits, before.logits, atol=1e-6, rtol=1e-5)
    assert torch.equal(after.experts, before.experts)
    if "switch" in spec:
        return
    fresh = MoE(DIM, 16, EXPERTS, router=router.spec).eval()
    fresh.load_state_dict(model["block"].state_dict())
    assert torch.equal(route(fresh.router, hidden).experts, before.experts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own, where it breaks the graph
def test_compiles(spec: str, hidden: Tensor) -> None:
    router = build(spec).eval()
    if router.stochastic:
        pytest.skip("draws at random")
    torch._dynamo.reset()
    compiled = torch.compile(router, backend="aot_eager")
    context = context_for(router, hidden)
    plain = router(hidden, context)
    again = compiled(hidden, context)
    assert torch.equal(plain.experts, again.experts)
    torch.testing.assert_close(plain.weights, again.weights)


def test_bad_input_says_what_is_allowed(spec: str) -> None:
    router = build(spec)
    with pytest.raises(ValueError, match=str(DIM)):
        router(torch.randn(2, 3, DIM + 1))
    with pytest.raises(ValueError, match="from 1 to 6"):
        set_top_k(router, 0)
    with pytest.raises(ValueError, match="from 1 to 6"):
        set_top_k(router, EXPERTS + 1)
    with pytest.raises(ValueError, match="from 1 to 6"):
        set_top_k(router, 2.0)  # type: ignore[arg-type]
