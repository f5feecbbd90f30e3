"""Our routers in the engines' own MoE layers, on a CPU: where an engine is not installed its tests are skipped."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pointsman
from pointsman import auxiliary, build_router, list_routers
from pointsman.engines.common import carried, dense, step_end
from pointsman.engines.vllm import RoutingFunction
from tests.library.engines.build import BUILDERS, DIM, EXPERTS, HIDDEN, Built

pytestmark = pytest.mark.filterwarnings("ignore")  # the engines' own
CARRIED = (
    "base", "forced", "frozen-scaled", "frozen-temperature", "hyperrouter", "loss-free:rate=0.1",
    "noisy-topk", "sigma", "sinkhorn", "smoe:balance=0.1", "smoe-dropout", "sparsemixer", "switch", "vmoe", "xmoe",
    "xmoe-torchscale",
)  # fmt: skip
"""The registered routers that take k experts for every token, and look at nothing but it and others of its batch."""
SPECS = (
    *CARRIED, "smoe:gate=sigmoid:renormalize=false", "hyperrouter:share=true", "xmoe:gate=sigmoid",
    "smoe@loss-free", "xmoe@loss-free:rate=0.1", "hyperrouter@loss-free", "frozen-scaled@loss-free", "xmoe@sigma",
    "hyperrouter@sparsemixer", "smoe-dropout@sinkhorn", "hyperrouter@base", "xmoe@noisy-topk",
    "hyperrouter@sigma", "frozen-temperature@base", "smoe@sinkhorn:z_loss=0.1",
    "sigma@loss-free",
)  # fmt: skip
RAGGED = ("depths", "dselect", "dynmoe", "expert-choice", "expert-threshold", "gshard", "relu", "top-p")
"""Those with another number of experts for each token, or that drop choices: in Megatron-core only."""
DEFAULTS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "megatron": [
        ({}, "smoe:bias=false"),
        ({"moe_router_pre_softmax": True}, "smoe:bias=false:renormalize=false"),
        ({"moe_router_score_function": "sigmoid"}, "smoe:bias=false:gate=sigmoid"),
    ],
    "torchtitan": [
        ({}, "smoe:bias=false:gate=sigmoid:renormalize=false"),
        ({"score_func": "softmax", "route_norm": True}, "smoe:bias=false"),
    ],
    "olmo_core": [
        ({}, "smoe:bias=false:renormalize=false"),
        ({"normalize_expert_weights": 1.0}, "smoe:bias=false"),
    ],
    "nemo": [
        ({}, "smoe:bias=false"),
        ({"norm_topk_prob": False}, "smoe:bias=false:renormalize=false"),
    ],
}
"""Settings of an engine's own router, and the spec of ours that is the same function."""


@pytest.fixture(params=BUILDERS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    try:
        importlib.import_module(BUILDERS[name][0])
    except ImportError:
        pytest.skip(f"{BUILDERS[name][0]} is not installed")
    if name == "olmo_core" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("OLMo-core's kernels need TRITON_INTERPRET=1 on a CPU")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)  # torchtitan's experts would round
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # Megatron's own router moves itself there
    torch.manual_seed(0)
    if name == "megatron":  # its gate's product is Transformer Engine's, for a GPU only
        router = importlib.import_module("megatron.core.transformer.moe.router")
        monkeypatch.setattr(router, "router_gating_linear", lambda x, weight, bias, dtype: x @ weight.T)
    return name


def build(engine: str) -> Callable[..., Built]:
    return BUILDERS[engine][1]


def ours(built: Built, spec: str, k: int) -> pointsman.MoE:
    """Our layer with the weights of the engine's."""
    shape = {"activation": "silu", "gated": True, "bias": False, "attach_losses": True}
    layer = pointsman.MoE(DIM, HIDDEN, EXPERTS, top_k=k, router=spec, **shape)  # type: ignore[arg-type]
    layer.experts.load_state_dict(built.experts())
    return layer


@pytest.mark.parametrize("spec", SPECS)
def test_the_engines_layer_equals_ours_forward_and_gradient(engine: str, spec: str) -> None:
    k = 1 if spec == "switch" else 2
    built = build(engine)(spec, k)
    layer = ours(built, spec, k)
    layer.router.load_state_dict(built.router.state_dict())
    built.layer.train()
    hidden = torch.randn(2, 5, DIM)
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    outputs = []
    for run, given in zip((built.run, layer), inputs, strict=True):
        torch.manual_seed(1)  # sigma draws in training
        outputs.append(run(given))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    factor = torch.randn_like(hidden)
    for output in outputs:
        (output * factor).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
    theirs = dict(built.router.named_parameters())
    for name, parameter in layer.router.named_parameters():
        torch.testing.assert_close(theirs[name].grad.view_as(parameter), parameter.grad, rtol=1e-3, atol=1e-5)
    step_end(built.layer)
    pointsman.step_end(layer)
    for name, value in layer.router.state_dict().items():  # a bias has moved, a norm is kept
        torch.testing.assert_close(built.router.state_dict()[name].view_as(value), value)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_balance_coefficient_means_the_same(engine: str, k: int) -> None:
    """The gradient that the loss alone gives: that of coefficient * E sum f P, at every k."""
    built = build(engine)("smoe:balance=0.5:bias=false", k)
    hidden = torch.randn(3, 7, DIM)
    (built.run(hidden) * 0).sum().backward()
    weight = built.router.score.weight.detach().double().requires_grad_()
    logits = hidden.double().reshape(-1, DIM) @ weight.T
    value = auxiliary.balance(torch.softmax(logits, -1), logits.topk(k, -1).indices, None)
    (0.5 * value).backward()
    torch.testing.assert_close(built.router.score.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-7)


def test_the_engines_own_router_equals_our_spec_of_it(engine: str) -> None:
    for settings, spec in DEFAULTS[engine]:
        built = build(engine)(None, 2, **settings)
        layer = ours(built, spec, 2)
        with torch.no_grad():
            torch.nn.init.normal_(built.own())
            layer.router.score.weight.copy_(built.own())
        hidden = torch.randn(2, 5, DIM)
        torch.testing.assert_close(built.run(hidden), layer(hidden), rtol=1e-4, atol=1e-5)


def test_the_state_dict_goes_there_and_back(engine: str) -> None:
    one, two = (build(engine)("hyperrouter") for _ in range(2))
    two.layer.load_state_dict(one.layer.state_dict())
    hidden = torch.randn(2, 5, DIM)
    torch.testing.assert_close(one.run(hidden), two.run(hidden))
    plain = build_router("hyperrouter", dim=DIM, num_experts=EXPERTS, top_k=2)
    plain.load_state_dict(one.router.state_dict())
    one.router.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("smoe+attention", "a mixer reads the attention"),
        ("hash", "it needs token_ids"),
        ("soft", "not combined by a weighted sum"),
        ("thor", "two passes"),
        ("compete", "asks all experts"),
        ("recurrent", "the sparse layer above"),
        ("smoe:nulls=1", "virtual experts"),
    ],
)
def test_what_an_engine_cannot_carry_is_refused_at_construction(engine: str, spec: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build(engine)(spec)


def test_routers_with_another_number_of_experts_for_each_token(engine: str) -> None:
    if engine == "megatron":  # its choice is a matrix [tokens, E]
        for spec in RAGGED:
            built = build(engine)(spec)
            layer = ours(built, spec, 2)
            layer.router.load_state_dict(built.router.state_dict())
            built.layer.eval()
            hidden = torch.randn(2, 6, DIM)
            torch.testing.assert_close(built.run(hidden), layer.eval()(hidden), rtol=1e-4, atol=1e-5)
        return
    for spec in ("top-p", "expert-choice"):
        with pytest.raises(ValueError, match="the number of experts differs between tokens"):
            build(engine)(spec)
    if engine != "nemo":  # whose experts skip a choice of none
        for spec in ("gshard", "xmoe@gshard"):
            with pytest.raises(ValueError, match="it drops choices"):
                build(engine)(spec)


def test_settings_of_the_engines_own_router_are_refused() -> None:
    pytest.importorskip("megatron.core")
    with pytest.raises(ValueError, match=r"moe_z_loss_coeff=0\.1 is TopKRouter's"):
        BUILDERS["megatron"][1]("smoe", moe_z_loss_coeff=0.1)
    pytest.importorskip("olmo_core.nn.moe")
    from pointsman.engines.olmo_core import RouterConfig

    with pytest.raises(ValueError, match=r"lb_loss_weight=0\.01 is MoELinearRouter's"):
        RouterConfig(spec="smoe", top_k=2).build(DIM, EXPERTS, lb_loss_weight=0.01)


def test_megatrons_schedule_sets_the_scale_of_the_losses() -> None:
    """Between forward and backward, into the tensor that the router's forward made."""
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    gradients = []
    for scale in (1.0, 0.25):
        torch.manual_seed(0)
        built = BUILDERS["megatron"][1]("smoe:balance=0.5")
        output = built.run(torch.ones(2, 5, DIM) + torch.arange(DIM))
        utils.MoEAuxLossAutoScaler.set_loss_scale(torch.full((1,), scale))
        (output * 0).sum().backward()
        gradients.append(built.router.score.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0] / 4)


def test_megatrons_sequence_parallelism_does_not_multiply_the_losses() -> None:
    """Each rank routes its part of a sequence, and Megatron adds up the gradients of the parts."""
    pytest.importorskip("megatron.core.transformer.moe.router")
    from pointsman.engines.megatron import router

    config = BUILDERS["megatron"][1]("smoe").layer.config  # type: ignore[union-attr]
    hidden, gradients = torch.randn(4, 3, DIM), []
    for ranks, per_token in ((1, False), (2, False), (1, True), (2, True)):
        torch.manual_seed(0)
        config.tensor_model_parallel_size, config.sequence_parallel = ranks, ranks > 1
        config.calculate_per_token_loss = per_token
        one = router("smoe:balance=0.5")(config)
        for part in hidden[:2].repeat(2, 1, 1).chunk(ranks):  # equal parts have equal loads
            (one(part)[0].sum() * 0).backward()
        gradients.append(one.router.score.weight.grad / (12 if per_token else 1))
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


def test_olmo_divides_the_losses_as_it_divides_its_own() -> None:
    pytest.importorskip("olmo_core.nn.moe")
    router = BUILDERS["olmo_core"][1]("smoe:balance=0.5").layer.router
    hidden = torch.randn(2, 5, DIM)
    whole, part = router(hidden)[3], router(hidden, loss_div_factor=40.0)[3]
    torch.testing.assert_close(part, whole / 4)  # a quarter of the step's tokens


def test_torchtitan_draws_weights_after_to_empty() -> None:
    pytest.importorskip("torchtitan.models.common.moe")
    from pointsman.engines.torchtitan import set_loss_scale

    with torch.device("meta"):
        layer = BUILDERS["torchtitan"][1]("xmoe").layer
    layer.to_empty(device="cpu").router.init_states()
    assert all(bool(value.isfinite().all()) for value in layer.router.state_dict().values())
    assert float(layer.router.router.score.expert_embeddings.std()) > 0
    set_loss_scale(layer, 0.25)
    assert float(layer.router.loss_scale) == 0.25


def test_the_page_says_which_router_each_engine_carries() -> None:
    """Where a router is refused the page has the reason."""
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text().split("## Which router where")[1]
    told = {row[1].strip("` "): row[2:] for row in (line.split("|") for line in page.splitlines() if "| `" in line)}
    assert list(told) == list_routers()
    for name, cells in told.items():
        sizes = {"dim": DIM, "num_experts": 8, "top_k": 1 if name == "switch" else 2}
        tries: list[Callable[[], object]] = [
            lambda of=name, to=sizes: carried("engine", of, **to, ragged=True, dropped=True),
            lambda of=name, to=sizes: carried("engine", of, **to, dropped=True),
            lambda of=name, to=sizes: carried("engine", of, **to),
            lambda of=name, to=sizes: RoutingFunction(build_router(of, **to, vocab_size=2)),
        ]
        for cell, attempt in zip(cells, tries, strict=False):
            try:
                attempt()
                assert cell.strip() == "yes", name
            except ValueError as error:
                assert cell.strip() == "-", name
                why = str(error).split(": ", 2)[2]
        assert cells[4].strip() == ("" if all(cell.strip() == "yes" for cell in cells[:4]) else why), name
    everywhere = [name for name, cells in told.items() if cells[2].strip() == "yes"]
    assert everywhere == [spec.partition(":")[0] for spec in CARRIED]
    assert len(SPECS) >= 30


@pytest.mark.parametrize("option", ["capacity", "eval_capacity"])
def test_capacity_is_refused_by_layers_that_drop_nothing(option: str) -> None:
    sizes = {"dim": DIM, "num_experts": EXPERTS, "top_k": 2}
    carried("engine", f"smoe:{option}=1", **sizes, dropped=True)
    with pytest.raises(ValueError, match=f"^engine: router 'smoe:{option}=1': capacity drops assignments"):
        carried("engine", f"smoe:{option}=1", **sizes)


def test_the_dense_form_of_a_routing() -> None:
    router = build_router("smoe", dim=DIM, num_experts=EXPERTS, top_k=2)
    context = pointsman.RoutingContext(padding_mask=torch.tensor([[True, True, False]]))
    routing = router(torch.randn(1, 3, DIM), context)
    weights, chosen = dense(routing)
    for token in range(3):
        for expert in range(EXPERTS):
            places = (routing.experts[token] == expert).nonzero().flatten().tolist()
            assert bool(chosen[token, expert]) == bool(places)
            assert float(weights[token, expert]) == sum(float(routing.weights[token, place]) for place in places)
