"""Every registered router, bare and mixed, through the contract of `pointsman.testing`."""

import pytest
import torch
from torch import Tensor

from pointsman import RoutingContext, list_routers, materialize
from pointsman.routers.frame import registry
from pointsman.routers.frame.registry import list_mixers
from pointsman.routers.frame.stages import Mixer
from pointsman.testing import CHECKS, Case, flags
from pointsman.testing import routing as checks
from pointsman.testing.contract import Check
from pointsman.testing.layer import compiles_in_training, trains_the_same_parameters

NON_CAUSAL = (
    "smoe+attention:heads=lowest-entropy-sequence", "expert-choice", "soft", "smoe:capacity=1.0:capacity_order",
    "vmoe:capacity", "pooled",
)  # fmt: skip
NON_CAUSAL_TRAINING = ("base", "depths", "sinkhorn")  # causal in evaluation
UNMIXED = ("hash", "pooled", "soft", "thor")  # their choice does not read mixed scores
MIXERS = ("similarity", "attention")
CHOICES = (
    "smoe", "hyperrouter", "xmoe",  # top-k; of generated scores; of a gate with a temperature
    "base", "compete", "default", "depths", "dselect", "dynmoe", "expert-choice", "expert-threshold", "gshard",
    "loss-free", "mask", "relu", "sigma", "sinkhorn", "sparsemixer", "stable", "top-p",
)  # fmt: skip
"""One router of each kind of choice: mixed in every run. The weekly workflow (`--all-specs`) mixes all routers."""
PLAIN = [
    *list_routers(),
    *(f"{router}+{mixer}" for router in CHOICES for mixer in MIXERS),
    *(f"smoe+{mixer}" for mixer in list_mixers() if mixer not in MIXERS),
    "smoe:gate=sigmoid",
    "smoe:capacity=1.0",
    "smoe:capacity=1.0:capacity_order=rank",
    "smoe:capacity=1.0:capacity_order=priority",
    "vmoe:capacity=1.0:eval_capacity=0.5:capacity_order=rank:capacity_scope=batch",
    "smoe:noise=0.1",
    "smoe:gate=sigmoid:scale=2.5:balance=0.1:balance_scope=step:balance_on=scores",
    "switch:jitter=0.1",
    "smoe:renormalize=false",
    "smoe:nulls=3",
    "smoe@pooled:over=task",
    "smoe:residual=true:variance=0.1:orthogonality=0.1",
    "smoe:nulls=4:kind=mixed:renormalize=false:eta=0.75:balance=0.1",
    "loss-free:gate=softmax:nulls=2:kind=copy:renormalize=false:scale=6:update=share:real=1",
    "recurrent:depth=average@loss-free:nulls=1:null_bias=-1:renormalize=false",
    "hyperrouter:share=true:embed_dim=5:hyper_dim=7",
    "hyperrouter:l2=0.1:embed_dropout=0.3:init=hyperfan:generate=expert",
    "xmoe:gate=sigmoid",
    "xmoe:routing_dim=full:normalize=false",
    "smoe+similarity:source=input",
    "smoe+similarity:source=attention",
    "smoe+similarity:learned=true",
    "smoe+similarity:neighbours=lower-entropy",
    "smoe+attention:heads=all",
    "smoe+attention:neighbours=lower-entropy",
    "smoe+attention:heads=lowest-entropy-sequence",
    "expert-choice:group=batch:gate=sigmoid:noise=0.2",
    "base:group=sequence",
    "sinkhorn:group=sequence:gate=sigmoid",
    "hash:gate=sqrtsoftplus",
    "hash:columns=2:gate=sqrtsoftplus:scale=1.5",
    "stable:light=bigram",
    "mask:visible=2",
    "compete:rate=1:diversity=0.1",
    "sparsemixer:version=1:r=1",
    "recurrent:depth=average",
    "soft:slots=2",
    "depths:share=0.5:gate=sigmoid",
    "smoe:weigh=input",
    "smoe@noisy-topk:init=normal",
]


OTHERS = [f"{router}+{mixer}" for router in list_routers() if router not in (*CHOICES, *UNMIXED) for mixer in MIXERS]
SPECS = [*PLAIN, *OTHERS]

COMPILED = [
    "base", "compete", "default", "depths", "dselect", "dynmoe", "expert-choice", "expert-threshold", "gshard", "hash",
    "hyperrouter", "loss-free", "mask", "noisy-topk", "pooled", "recurrent", "relu", "sigma", "sinkhorn", "smoe",
    "smoe-dropout",
    "soft", "sparsemixer", "stable", "switch", "thor", "top-p", "vmoe", "xmoe", "smoe+similarity", "smoe+attention",
    "smoe+similarity:source=attention", "smoe:capacity=1.0:capacity_order=rank",
    "loss-free:gate=softmax:nulls=2:kind=copy:renormalize=false:scale=6", "smoe:weigh=input",
]  # fmt: skip
"""One spec a mechanism: compilation takes seconds for each, so the others are compiled weekly."""
IN_FLOAT64 = ("smoe", "loss-free", "relu", "soft", "smoe+similarity", "smoe:weigh=input")
COMPILING = (checks.compiles, compiles_in_training, trains_the_same_parameters)


def case(spec: str) -> Case:
    return Case(spec, dim=24, num_experts=6)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each check with each spec; those that compile with a spec a mechanism, unless `--all-specs` is given."""
    if metafunc.function is not test_contract:
        return
    everything = metafunc.config.getoption("--all-specs")
    pairs = []
    for check in CHECKS:
        specs = SPECS if everything else PLAIN
        if check in COMPILING and not everything:
            specs = list(IN_FLOAT64) if check is trains_the_same_parameters else COMPILED
        marks = [pytest.mark.slow] if check in COMPILING else []
        pairs += [pytest.param(check, spec, marks=marks, id=f"{check.__name__}-{spec}") for spec in specs]
    metafunc.parametrize(("check", "spec"), pairs)


def test_contract(check: Check, spec: str) -> None:
    check(case(spec))


def test_a_layer_in_training_compiles() -> None:
    compiles_in_training(case("smoe:balance=0.1:z_loss=0.1"))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["smoe:balance=0.1", "loss-free", "hyperrouter+similarity"])
def test_generated_code_trains_as_eager(spec: str) -> None:
    compiles_in_training(case(spec), "inductor")


@pytest.mark.slow
def test_weights_before_the_experts_compile_where_their_number_varies() -> None:
    trains_the_same_parameters(case("top-p:weigh=input"))
    compiles_in_training(case("top-p:weigh=input"))


@pytest.mark.parametrize("spec", SPECS)
def test_which_routers_are_causal_and_batch_invariant(spec: str) -> None:
    router = case(spec).router()
    assert router.causal == (not spec.startswith(NON_CAUSAL))
    assert router.training_causal == (not spec.startswith(NON_CAUSAL + NON_CAUSAL_TRAINING))
    of_others = spec.partition("+")[0] == "forced" or "choice:group=batch" in spec
    alone = not of_others and not spec.endswith(("+shuffled", "capacity_scope=batch"))
    assert router.batch_invariant == alone


@pytest.mark.parametrize("spec", SPECS)
def test_which_routers_materialize(spec: str) -> None:
    layer = case(spec).layer().eval()
    none = ("xmoe", "thor", "hash", "mask", "stable", "soft", "recurrent", "dselect", "dynmoe")
    if spec.startswith(none):
        with pytest.raises(ValueError, match="router"):
            materialize(layer)
        return
    materialize(layer)
    if "switch" in spec:
        return
    fresh = Case(layer.router.spec, 24, 6).layer().eval()
    fresh.load_state_dict(layer.state_dict())
    hidden = case(spec).hidden()
    left, right = (checks.route(each.router, hidden).experts for each in (layer, fresh))
    assert torch.equal(left, right)


class Cheat(Mixer):
    """A mixer that declares itself causal, batch invariant and deterministic, and is not: `kind` says in what.

    `in_training`: in training only.
    """

    def __init__(self, kind: str, in_training: bool) -> None:
        super().__init__()
        self.kind, self.in_training = kind, in_training

    def forward(
        self, probs: Tensor, hidden: Tensor, context: RoutingContext
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        if self.in_training and not self.training:
            return probs, {}, {}
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


@pytest.mark.parametrize("router", ["smoe", "top-p"])
@pytest.mark.parametrize("in_training", [False, True])
@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("looks ahead", flags.causal_flag),
        ("forgets", flags.segments),
        ("forgets", checks.padding),  # nor does it leave padding out
        ("sees other sequences", flags.batch_invariant_flag),
        ("draws", flags.stochastic_flag),
    ],
)
def test_a_mixer_with_a_false_flag_fails(
    kind: str, check: Check, in_training: bool, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_training and check is flags.segments:
        pytest.skip("models carry state over in evaluation")
    monkeypatch.setitem(
        registry.MIXERS, "cheat", registry.Entry("cheat", lambda site: Cheat(kind, in_training), "", "")
    )
    assert "cheat" in list_mixers()
    with pytest.raises(AssertionError):
        check(case(f"{router}+cheat"))
