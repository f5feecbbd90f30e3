"""The spec grammar: what it accepts, and what it says when it does not."""

import pytest

from pointsman import build_router, build_routers, list_routers
from pointsman.routers.frame.registry import BASELINES, entry, parse_spec


def test_options_and_mixer_come_apart() -> None:
    spec = parse_spec("hyperrouter:hyper_dim=8:share=true")
    assert (spec.router, spec.options, spec.mixer) == ("hyperrouter", {"hyper_dim": "8", "share": "true"}, None)


def test_keyword_options_enter_the_spec() -> None:
    assert build_router("hyperrouter", dim=8, num_experts=4, hyper_dim=16).spec == "hyperrouter:hyper_dim=16"


def test_a_number_may_stand_for_the_word_of_an_option() -> None:
    assert build_router("compete", dim=8, num_experts=4, version=1).spec == "compete:version=1"


def test_several_specs_are_cycled_over_the_layers() -> None:
    specs = [router.spec for router in build_routers("smoe|switch", layers=3, dim=8, num_experts=4)]
    assert specs == ["smoe", "switch", "smoe"]


def test_every_entry_explains_itself() -> None:
    for name in list_routers():
        assert entry(name).summary
        assert entry(name).paper
    assert not set(BASELINES) & set(list_routers())


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
