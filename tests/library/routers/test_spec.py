"""The spec grammar: what it accepts, and what it says when it does not."""

import pytest

from pointsman import build_router, build_routers, list_routers
from pointsman.routers.frame.registry import BASELINES, entry, parse_spec


def test_options_and_mixer_come_apart() -> None:
    spec = parse_spec("hyperrouter:hyper_dim=8:share=true")
    assert (spec.router, spec.options, spec.mixer) == ("hyperrouter", {"hyper_dim": "8", "share": "true"}, None)


def test_keyword_options_enter_the_spec() -> None:
    assert build_router("hyperrouter", dim=8, num_experts=4, hyper_dim=16).spec == "hyperrouter:hyper_dim=16"


def test_several_specs_are_cycled_over_the_layers() -> None:
    specs = [router.spec for router in build_routers("smoe|switch", layers=3, dim=8, num_experts=4)]
    assert specs == ["smoe", "switch", "smoe"]


def test_every_entry_explains_itself() -> None:
    for name in list_routers():
        assert entry(name).summary
        assert entry(name).paper
    assert not set(BASELINES) & set(list_routers())


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "a router spec must be a name"),
        ("smo", "did you mean 'smoe'"),
        ("hyperouter", "did you mean 'hyperrouter'"),
        ("smoe:gatee=softmax", "did you mean 'gate'"),
        ("smoe:gate=tanh", "softmax or sigmoid"),
        ("smoe:gate", "is not option=value"),
        ("smoe:gate=softmax:gate=sigmoid", "given twice"),
        ("smoe:bias=maybe", "true or false"),
        ("smoe:balance=lots", "a number"),
        ("smoe:balance=nan", "a number"),
        ("hyperrouter:hyper_dim=2.5", "a whole number"),
        ("hyperrouter:hyper_dim=0", "from 1"),
        ("smoe:capacity=0", "above 0"),
        ("smoe+similarty", "unknown mixer"),
        ("smoe+similarity+attention", "at most one mixer"),
        ("dense:bias=false", "takes no options"),
        ("dense", "baseline without a router"),
        ("thor:renormalize=false", "thor has its own rule for renormalize; leave the option out"),
        ("expert-choice:capacity=1", "expert-choice has its own rule for capacity"),
        ("expert-choice:eval_capacity=1", "expert-choice has its own rule for eval_capacity"),
        ("soft:eval_capacity=0.5", "soft has its own rule for eval_capacity"),
    ],
)
def test_mistakes_are_named(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        build_router(spec, dim=8, num_experts=4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", list_routers())
@pytest.mark.parametrize("renormalize", [False, True])
def test_renormalize_holds_or_is_refused(name: str, renormalize: bool) -> None:
    try:
        router = build_router(name, dim=8, num_experts=4, vocab_size=16, renormalize=renormalize)
    except ValueError as error:
        assert "renormalize" in str(error)  # noqa: PT017
    else:
        assert router.select.renormalize is renormalize


@pytest.mark.parametrize("arguments", [{"dim": 0}, {"num_experts": 0}, {"top_k": 0}, {"top_k": 5}, {"top_k": 1.5}])
def test_sizes_are_checked(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="allowed are whole numbers from 1"):
        build_router("smoe", **{"dim": 8, "num_experts": 4, **arguments})
