"""Where routers met values that ran into limits: saturated gates, full experts, padding, copies by `.data`."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import pointsman
from pointsman import MoE, RoutingContext, build_router, freeze, materialize, step_end, track_steps
from pointsman.auxiliary import balance, token_mean
from pointsman.ops.kernels import PLAIN, Kernels, using
from pointsman.ops.linear import orthogonal_
from pointsman.routers.frame.registry import (
    BASELINES,
    MIXERS,
    ROUTERS,
    Entry,
    LayerSpec,
    parse_spec,
    register_mixer,
    register_router,
)  # fmt: skip
from pointsman.routers.frame.stage_values import Loss
from pointsman.routers.frame.stages import Stages


@pytest.mark.parametrize(
    "spec",
    ["smoe:gate=sigmoid", "smoe", "xmoe:gate=sigmoid", "smoe:gate=sigmoid:capacity=4"]
    + [f"smoe:gate=sigmoid+{mixer}:strength=0" for mixer in ("uniform", "similarity")],
)
def test_selection_knows_logits_whose_probabilities_are_equal(spec: str) -> None:
    router = build_router(spec, dim=4, num_experts=4, top_k=1).eval()
    scale = 1e-3 if spec.startswith("xmoe") else 1.0
    if spec.startswith("xmoe"):
        nn.init.constant_(router.normalize.temperature, 1e-3)
    for logits, best in (([18.0, 20.0, 30.0, 17.0], 2), ([-200.0, -300.0, -150.0, 0.0], 3)):
        router.score.forward = lambda *_, row=logits: scale * torch.tensor(row).view(1, 1, 4)  # type: ignore[method-assign]
        assert router(torch.zeros(1, 4)).experts.tolist() == [[best]]


def one_expert_for_all(spec: str, num_experts: int, k: int = 1) -> nn.Module:
    router = build_router(spec, dim=4, num_experts=num_experts, top_k=k)
    with torch.no_grad():
        router.score.weight.zero_()
        router.score.bias.copy_(torch.arange(num_experts, 0, -1.0))
    return router.eval()


def test_padding_gives_no_capacity() -> None:
    router = one_expert_for_all("smoe:capacity=1.0", 2)
    hidden, mask = torch.randn(1, 16, 4), torch.zeros(1, 16, dtype=torch.bool)
    mask[:, :8] = True
    alone = router(hidden[:, :8]).experts
    assert int((alone >= 0).sum()) == 4
    assert torch.equal(router(hidden, RoutingContext(padding_mask=mask)).experts[:8], alone)


def test_a_capacity_that_is_a_whole_number_is_that_number() -> None:
    routing = one_expert_for_all("smoe:capacity=1.1", 4, k=2)(torch.randn(1, 100, 4))
    assert int((routing.experts == 0).sum()) == 55  # 1.1 * 100 * 2 / 4
    mask = torch.ones(1, 100, dtype=torch.bool)
    routing = one_expert_for_all("smoe:capacity=1.1", 4, k=2)(torch.randn(1, 100, 4), RoutingContext(padding_mask=mask))
    assert int((routing.experts == 0).sum()) == 55


def test_the_balance_loss_counts_what_was_chosen_not_what_found_a_place() -> None:
    hidden = torch.randn(1, 12, 4)
    free, full = (one_expert_for_all(f"smoe:balance=1.0{more}", 3)(hidden) for more in ("", ":capacity=1.0"))
    assert int((full.experts < 0).sum()) > 0
    assert torch.equal(full.weights == 0, full.experts < 0)
    assert torch.equal(free.losses["balance"], full.losses["balance"])


def test_no_tokens_have_no_loss() -> None:
    assert float(balance(torch.zeros(0, 3), torch.zeros(0, 1, dtype=torch.int64))) == 0
    values = torch.tensor([[1.0], [torch.nan]])
    assert token_mean(values, torch.tensor([True, False])).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_padding_mask_is_bool(dtype: torch.dtype) -> None:
    router = build_router("smoe", dim=4, num_experts=2)
    with pytest.raises(ValueError, match=f"padding_mask must be bool, True for a real token, got {dtype}"):
        router(torch.zeros(1, 3, 4), RoutingContext(padding_mask=torch.ones(1, 3, dtype=dtype)))


def test_a_generated_router_follows_data_and_inference_tensors() -> None:
    router = build_router("hyperrouter:hyper_dim=8", dim=16, num_experts=4).eval()
    hidden = torch.randn(5, 16)
    with torch.no_grad():
        before = router(hidden).logits
        router.score.embedding.data.copy_(torch.randn(16))
        after = router(hidden).logits
        assert not torch.equal(before, after)
        assert torch.equal(after, copy.deepcopy(router)(hidden).logits)
    with torch.inference_mode():
        built = build_router("hyperrouter:hyper_dim=8", dim=16, num_experts=4)
        assert torch.equal(built(hidden).logits, built(hidden).logits)


@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        ("smoe:gate=softmax", {"gate": "sigmoid"}, "smoe:gate=sigmoid"),
        ("similarity:tau=0.2", {"balance": 0.5}, "smoe:balance=0.5+similarity:tau=0.2"),
        ("smoe+similarity", {"bias": False, "capacity": None}, "smoe:bias=false:capacity=none+similarity"),
        (" xmoe ", {}, "xmoe"),
    ],
)
def test_the_spec_of_a_router_with_options_is_one(spec: str, options: dict[str, object], expected: str) -> None:
    router = build_router(spec, dim=4, num_experts=2, **options)
    assert router.spec == expected
    parse_spec(router.spec)
    assert build_router(router.spec, dim=4, num_experts=2).balance == router.balance


def test_freezing_can_be_undone() -> None:
    layer = MoE(8, 8, 4, router="xmoe")
    freeze(layer, "router")
    assert layer.router.frozen
    layer.router.requires_grad_(True)
    assert not layer.router.frozen
    with torch.no_grad():
        layer.router.score.expert_embeddings.mul_(5)
    step_end(layer)
    norms = layer.router.score.expert_embeddings.norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, 0.1))


@pytest.mark.parametrize("role", ["router", "moe"])
def test_the_state_of_a_frozen_router_stays(role: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), MoE(8, 8, 4, router="loss-free", attach_losses=True))
    freeze(model, role)
    model(torch.randn(2, 9, 8)).sum().backward()
    step_end(model)
    assert model[1].router.frozen
    assert not model[1].router.select.bias.any()


def test_a_freeze_of_no_role_is_refused() -> None:
    with pytest.raises(ValueError, match=r"freeze: no role is given, as in freeze\(model, \"router\"\)"):
        freeze(MoE(8, 8, 4))


def test_a_materialized_router_stays_frozen() -> None:
    layer = MoE(8, 8, 4, router="hyperrouter:hyper_dim=4")
    freeze(layer, "router")
    materialize(layer)
    assert layer.router.frozen
    assert not any(parameter.requires_grad for parameter in layer.router.parameters())


def test_loading_is_no_step(recwarn: pytest.WarningsRecorder) -> None:
    layer, other = MoE(8, 8, 4, router="xmoe"), MoE(8, 8, 4, router="xmoe")
    layer(torch.randn(3, 8)).sum().backward()
    step_end(layer)
    layer.load_state_dict(other.state_dict())
    layer(torch.randn(3, 8))
    assert not [warning for warning in recwarn if "step_end" in str(warning.message)]


@pytest.mark.parametrize("spec", ["smoe", "hyperrouter", "xmoe", "smoe+similarity", "smoe+attention"])
def test_a_layer_is_built_without_memory_first(spec: str) -> None:
    with torch.device("meta"):
        layer = MoE(8, 8, 4, router=spec)
    layer.to_empty(device="cpu")
    assert float(layer.delivery.scale) == 1.0
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 0)
    layer.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
    assert all(torch.isfinite(one).all() for one in layer.state_dict().values())
    torch.manual_seed(0)
    layer.router.reset_parameters()
    torch.manual_seed(0)
    other = build_router(spec, dim=8, num_experts=4)
    for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
        for (name, own), (_, drawn) in zip(kind(layer.router), kind(other), strict=True):
            assert torch.equal(own, drawn), name


def test_a_router_drawn_anew_takes_what_follows_from_its_state() -> None:
    stable = build_router("stable:stage_one=1", dim=8, num_experts=4, vocab_size=10).train()
    stable.step_end()
    assert not stable.score.light.requires_grad
    stable.reset_parameters()
    assert stable.score.light.requires_grad
    compete = build_router("compete:rate=1:warmup=1", dim=8, num_experts=4)
    compete.step_end()
    assert compete.score.competes
    compete.reset_parameters()
    assert not compete.score.competes
    with torch.device("meta"):
        empty = build_router("compete:rate=1", dim=8, num_experts=4)
    empty.reset_parameters()
    assert not empty.score.competes
    empty.to_empty(device="cpu").reset_parameters()
    assert empty.score.competes


def test_a_changed_router_is_not_drawn_anew_in_part() -> None:
    layer = MoE(8, 8, 1, top_k=1, router="smoe-dropout")
    materialize(layer)
    layer.router.reset_parameters()
    layer.router.score.weight = nn.Parameter(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="it has other tensors than a new one: load its weights"):
        layer.router.reset_parameters()


def test_a_forward_on_the_meta_device_keeps_the_scale() -> None:
    with torch.device("meta"):
        layer = MoE(8, 8, 4, router="smoe:balance=0.1", attach_losses=True)
    layer(torch.randn(3, 8, device="meta"))
    layer.to_empty(device="cpu")
    layer(torch.randn(3, 8))
    assert float(layer.delivery.scale) == 1.0


def test_an_optimizer_with_hooks_of_its_own_is_the_one_that_is_tracked() -> None:
    layer = MoE(8, 8, 4, router="xmoe")
    outer = torch.optim.SGD(layer.parameters(), 0.1)
    outer.optimizer = torch.optim.SGD(layer.parameters(), 0.1)  # as Lookahead's
    with track_steps(layer, outer):
        assert len(outer._optimizer_step_post_hooks) == 1


@pytest.mark.parametrize("spec", ["xmoe", "stable:stage_one=3", "loss-free"])
@pytest.mark.parametrize("tracked", [1, None])
def test_optimizers_that_step_in_the_backward_pass(spec: str, tracked: int | None) -> None:
    """One for each parameter, of which one or all are tracked: the step ends once, after the pass."""
    torch.manual_seed(0)
    hidden, context = torch.randn(2, 5, 8), RoutingContext(token_ids=torch.arange(10).view(2, 5))
    model = nn.Sequential(nn.Linear(8, 8), MoE(8, 8, 4, router=spec, vocab_size=10))
    plain = copy.deepcopy(model)
    whole = torch.optim.SGD(plain.parameters(), 0.1)
    each = {one: torch.optim.SGD([one], 0.1) for one in model.parameters() if one.requires_grad}
    for one in reversed(each):
        one.register_post_accumulate_grad_hook(lambda one: each[one].step() or each[one].zero_grad())
    for one in [*each.values()][:tracked]:
        track_steps(model, one)
    track_steps(plain, whole)
    for _ in range(4):
        for one in (model, plain):
            pointsman.add_losses(one[1](one[0](hidden), context).square().mean(), one).backward()
        whole.step()
        whole.zero_grad()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name


def test_states_keep_float32_where_the_default_is_half() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = MoE(8, 8, 4, router="loss-free:rate=0.001")
        assert layer.router.select.bias.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("spec", [*ROUTERS, *(f"smoe+{name}" for name in MIXERS if name != "attention")])
def test_a_model_that_is_made_in_bf16_trains(spec: str) -> None:
    """As large models are: with torch's default dtype set."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        layer, hidden = MoE(8, 8, 4, router=spec, vocab_size=9), torch.randn(2, 5, 8, requires_grad=True)
        output = layer(hidden, RoutingContext(token_ids=torch.randint(9, (2, 5))))
        pointsman.add_losses(output.float().square().sum(), layer).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert output.dtype == hidden.grad.dtype == torch.bfloat16
    assert bool(hidden.grad.isfinite().all())


def test_orthogonal_weights_are_those_of_torch() -> None:
    ours, theirs = torch.empty(3, 5), torch.empty(3, 5)
    torch.manual_seed(0)
    orthogonal_(ours, 0.1)
    torch.manual_seed(0)
    assert torch.equal(ours, nn.init.orthogonal_(theirs, gain=0.1))


def test_a_copy_and_a_wrapped_optimizer_forget_no_step(recwarn: pytest.WarningsRecorder) -> None:
    layer = MoE(8, 8, 4, router="xmoe")
    wrapped = torch.optim.Optimizer.__new__(torch.optim.SGD)  # as accelerate's, which has no hooks of its own
    wrapped.optimizer = optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    track_steps(layer, wrapped)
    for one in (layer, copy.deepcopy(layer)):
        one(torch.randn(3, 8)).sum().backward()
        optimizer.step()
    copy.deepcopy(layer)(torch.randn(3, 8))
    assert not [warning for warning in recwarn if "step_end" in str(warning.message)]


def test_a_mask_in_place_of_a_context_and_an_objective_that_nobody_computes() -> None:
    with pytest.raises(ValueError, match=r"smoe: context is a Tensor: give RoutingContext\(padding_mask=…\)"):
        MoE(8, 8, 4)(torch.randn(1, 3, 8), torch.ones(1, 3, dtype=torch.bool))
    layer = MoE(8, 8, 4, router="thor")
    other = MoE(8, 8, 4, router="thor")
    other.router.objective_known = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (layer, other):
            one(torch.randn(3, 8)).sum().backward()
            torch.optim.SGD(one.parameters(), 0.1).step()
        other(torch.randn(3, 8))
    with pytest.warns(UserWarning, match="thor: its objective, consistency, is the loop's to compute"):
        layer(torch.randn(3, 8))


def test_biases_of_experts_are_not_decayed_whatever_their_names() -> None:
    part = nn.Module()
    part.gate_up_proj_bias, part.down_proj = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(4, 8, 8))
    decayed, others = pointsman.param_groups(part)
    assert (decayed["params"], others["params"]) == ([part.down_proj], [part.gate_up_proj_bias])


def test_statistics_are_gathered_where_no_loss_is() -> None:
    from pointsman.testing.case import attention_trace as trace

    layer, hidden = MoE(24, 8, 4, router="smoe+attention"), torch.randn(2, 5, 24)
    layer(hidden, RoutingContext(attention=trace(hidden))).sum().backward()
    step_end(layer)
    assert int(layer.router.mix.head_steps) == 1


@pytest.mark.parametrize("hidden_dim", [0, -3, 2.5, True])
def test_sizes_of_experts_are_whole(hidden_dim: object) -> None:
    with pytest.raises(ValueError, match=r"hidden_dim=.*: allowed are whole numbers from 1"):
        MoE(8, hidden_dim, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"activation": torch.relu}, {"activation": None}, {"experts": 3}])
def test_a_name_that_is_no_text_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"unknown {next(iter(given))} .*: allowed: "):
        MoE(8, 8, 4, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [1e-12, 1e6])
@pytest.mark.parametrize("masked", [False, True])
def test_every_capacity_in_range_keeps_the_first_token(capacity: float, masked: bool) -> None:
    router = build_router(f"smoe:capacity={capacity}", dim=8, num_experts=4)
    mask = torch.ones(2, 5, dtype=torch.bool) if masked else None
    routing = router(torch.randn(2, 5, 8), RoutingContext(padding_mask=mask))
    kept = (routing.experts >= 0).view(2, 5, 2)
    assert kept[:, 0].all()
    assert kept.all() == (capacity > 1)


@pytest.mark.parametrize("experts", ["ffn", "base"])
@pytest.mark.parametrize("router", ["smoe", "xmoe+similarity", "smoe:capacity=1.5", "thor"])
def test_shapes_alone_on_the_meta_device(router: str, experts: str) -> None:
    with torch.device("meta"):
        layer, hidden = MoE(16, 32, 4, router=router, experts=experts), torch.empty(2, 5, 16, requires_grad=True)
        output = layer(hidden)
    assert output.is_meta
    assert output.shape == hidden.shape
    output.sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("kernels", [None, PLAIN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("tokens", [0, 5])
def test_shapes_alone_in_every_dtype(tokens: int, dtype: torch.dtype, kernels: Kernels | None) -> None:
    with torch.device("meta"), using(kernels):
        output = MoE(16, 32, 4).to(dtype)(torch.empty(2, tokens, 16, dtype=dtype))
    assert (output.shape, output.dtype, output.is_meta) == ((2, tokens, 16), dtype, True)


@pytest.mark.parametrize("name", [*BASELINES, "oracle", "all", "", "a b", "a:b", "a@b", "a+b", "a|b", "a,b", "a=b"])
def test_a_name_that_no_spec_could_reach(name: str) -> None:
    def build(layer: LayerSpec) -> Stages:
        raise NotImplementedError

    for register in (register_router, register_mixer):
        with pytest.raises(ValueError, match=f"a router or mixer cannot be called '{re.escape(name)}'"):
            register(name, paper="none")(build)  # type: ignore[operator]
    assert name not in ROUTERS | MIXERS


def test_a_router_without_options_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(layer: LayerSpec) -> Stages:
        raise NotImplementedError

    monkeypatch.setitem(ROUTERS, "bare", Entry("bare", build, "", ""))
    with pytest.raises(ValueError, match=r"'bare' has no option 'gates': allowed: none$"):
        parse_spec("bare:gates=sigmoid@loss-free")


def test_a_second_pass_through_the_graph_is_no_second_micro_batch() -> None:
    layer = MoE(8, 8, 4, router="loss-free").train()
    loss = layer(torch.randn(5, 8)).sum()
    loss.backward(retain_graph=True)
    before = layer.router.select.sums["counts"].clone()
    loss.backward()
    assert torch.equal(layer.router.select.sums["counts"], before)


def test_a_state_that_is_loaded_forgets_the_step_that_was_thrown_away() -> None:
    layer = MoE(8, 8, 4, router="loss-free").train()
    saved = copy.deepcopy(layer.state_dict())
    layer(torch.randn(5, 8)).sum().backward()
    layer.load_state_dict(saved)
    step_end(layer)
    assert not layer.router.select.bias.any()


def test_a_loss_of_one_number_is_a_scalar() -> None:
    layer = MoE(8, 8, 4, attach_losses=True).train()
    layer.router.losses = {"own": Loss(lambda given: given.logits.square().mean().reshape(1), 0.1)}
    layer(torch.randn(5, 8)).sum().backward()
    assert layer.router.losses
    layer = MoE(8, 8, 4).train()
    layer.router.losses = {"own": Loss(lambda given: given.logits.square().mean().reshape(1), 0.1)}
    assert pointsman.add_losses(layer(torch.randn(5, 8)).sum(), layer).shape == ()


def test_base_experts_are_drawn_anew_from_parents_and_from_children() -> None:
    for order in (list, reversed):
        with torch.device("meta"):
            layer = MoE(8, 16, 4, experts="base")
        layer.to_empty(device="cpu")
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.data.fill_(7)
        for part in order([*layer.modules()]):  # type: ignore[operator]
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        for norm, sublayer in zip(layer.experts.norms, layer.experts.sublayers, strict=True):
            assert (norm.weight == 1).all()
            assert not norm.bias.any()
            assert not sublayer.w_out.any()
            assert not sublayer.b_out.any()
            assert 0 < sublayer.w_in.abs().max() < 1


def test_materialize_takes_virtual_experts_and_declares_what_it_made() -> None:
    layer = MoE(8, 8, 4, router="hyperrouter@loss-free:nulls=1").eval()
    hidden = torch.randn(6, 8)
    before = layer(hidden)
    materialize(layer)
    torch.testing.assert_close(layer(hidden), before)
    layer = MoE(8, 8, 4, router="noisy-topk")
    assert layer.router.training_stochastic
    assert not materialize(layer).router.training_stochastic


def test_virtual_experts_keep_the_dtype_of_autocast() -> None:
    layer = MoE(8, 8, 4, router="smoe:nulls=4:kind=mixed")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(6, 8)).dtype == MoE(8, 8, 4)(torch.randn(6, 8)).dtype == torch.bfloat16


def test_no_expert_has_no_weight() -> None:
    routing = build_router("smoe:gate=sqrtsoftplus@mask:visible=1", dim=8, num_experts=4, top_k=2, vocab_size=9)(
        torch.randn(20, 8), RoutingContext(token_ids=torch.randint(9, (20,)))
    )
    assert (routing.experts < 0).sum() == 20
    assert not routing.weights[routing.experts < 0].any()


def test_biased_logits_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="does not read mixed scores; leave the mixer out"):
        build_router("loss-free:biased=logits+similarity", dim=8, num_experts=4)


def test_an_id_below_0_is_none_of_the_table_where_nobody_looks() -> None:
    scorer = build_router("hash", dim=8, num_experts=4, vocab_size=9).score
    context = RoutingContext(token_ids=torch.tensor([[-1, 3]], device="meta"))
    assert scorer.ids(context).is_meta
    looked = torch.compile(scorer.ids, backend="eager")(RoutingContext(token_ids=torch.tensor([[-1, 3]])))
    assert looked.tolist() == [[9, 3]]


@pytest.mark.parametrize("spec", ["hash", "mask", "stable"])
def test_token_ids_are_whole_numbers_of_a_kind_that_tables_take(spec: str) -> None:
    router, hidden = build_router(spec, dim=8, num_experts=4, vocab_size=9), torch.randn(2, 3, 8)
    for dtype in (torch.uint8, torch.float32, torch.bool):
        with pytest.raises(ValueError, match=f"{spec}: RoutingContext.token_ids must be int64, got {dtype}"):
            router(hidden, RoutingContext(token_ids=torch.ones(2, 3, dtype=dtype)))
    router(hidden, RoutingContext(token_ids=torch.ones(2, 3, dtype=torch.int32)))


def test_the_rooms_of_the_library_are_found_from_its_name() -> None:
    assert pointsman.parallel.parallelize is not None
    assert pointsman.parallel.Layout.parse("experts=2", 2).experts == 2
    assert pointsman.traces.RoutingTrace is not None
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = pointsman.parallel.paralelize


def test_what_is_recorded_keeps_no_graph() -> None:
    layer = MoE(8, 8, 4, router="recurrent")
    hidden = torch.randn(1, 3, 8, requires_grad=True)
    with pointsman.record_routing(layer) as records:
        layer(hidden, RoutingContext(padding_mask=torch.ones(1, 3, dtype=torch.bool), past={"a": hidden}))
    context = records.contexts[""]
    assert context is not None
    assert context.padding_mask is not None
    assert not context.past


def test_weights_that_capacity_divides_are_1_at_k_1(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(ValueError, match="capacity_total needs capacity"):
        build_router("switch:eval_capacity=4:capacity_total=one", dim=8, num_experts=4)
    for spec in ("switch:capacity=1:capacity_total=one", "smoe:dense_gradient=true"):
        layer = MoE(8, 8, 4, router=spec, top_k=1).train()
        layer(torch.randn(1, 3, 8))
        told = ["every weight is exactly 1" in str(one.message) for one in recwarn]
        assert any(told) == spec.startswith("switch")
        recwarn.clear()
    with pytest.warns(UserWarning, match="one expert leaves it nothing to choose"):
        MoE(8, 8, 1, top_k=1)(torch.randn(1, 3, 8))
