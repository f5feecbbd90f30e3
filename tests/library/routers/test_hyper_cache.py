"""HyperRouter's evaluation cache follows the embedding, also where an optimizer moves it without counting a version."""

import copy

import pytest
import torch
from torch.func import functional_call, jvp

from pointsman import build_router, build_routers


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_evaluation_after_an_optimizer_step_is_of_the_new_embedding(options: dict[str, bool]) -> None:
    router = build_router("hyperrouter:hyper_dim=8", dim=16, num_experts=4)
    hidden = torch.randn(5, 16)
    optimizer = torch.optim.Adam(router.parameters(), lr=1.0, **options)
    for _ in range(2):
        with torch.no_grad():
            before = router.eval()(hidden).logits
        router.train()(hidden).weights.square().sum().backward()
        optimizer.step()
        router.step_end()
        with torch.no_grad():
            cached = router.eval()(hidden).logits
        fresh = router.eval()(hidden).logits.detach()  # with gradients enabled nothing is cached
        torch.testing.assert_close(cached, fresh, rtol=0, atol=0)
        assert not torch.equal(before, cached)


@pytest.mark.parametrize("generate", ["whole", "expert"])
def test_a_shared_hypernetwork_that_one_router_loads_is_the_others_too(generate: str) -> None:
    spec = f"hyperrouter:hyper_dim=8:share=true:generate={generate}"
    first, second, saved = (
        router.eval() for pair in (2, 1) for router in build_routers(spec, layers=pair, dim=16, num_experts=4)
    )
    hidden = torch.randn(5, 16)
    with torch.no_grad():
        before = second(hidden).logits
        first.load_state_dict(saved.state_dict())
        after = second(hidden).logits
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, second(hidden).logits.detach(), rtol=0, atol=0)


def test_a_shared_hypernetwork_that_one_router_is_assigned_is_the_others_too() -> None:
    spec = "hyperrouter:hyper_dim=8:share=true"
    first, second = (router.eval() for router in build_routers(spec, layers=2, dim=16, num_experts=4))
    other = build_routers(spec, layers=1, dim=16, num_experts=4)[0]
    with pytest.raises(ValueError, match="layers=-1: allowed are whole numbers from 0"):
        build_routers(spec, layers=-1, dim=16, num_experts=4)
    hidden = torch.randn(5, 16)
    with torch.no_grad():
        second(hidden)
        first.load_state_dict(other.state_dict(), assign=True)
        after = second(hidden).logits
    torch.testing.assert_close(after, second(hidden).logits.detach(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("generate", ["whole", "expert"])
def test_forward_mode_without_gradients_keeps_the_tangent_and_leaves_nothing_behind(generate: str) -> None:
    router, hidden = build_router(f"hyperrouter:generate={generate}", dim=16, num_experts=4).eval(), torch.randn(5, 16)
    state = {name: parameter.detach() for name, parameter in router.named_parameters()}
    turned = {name: torch.randn_like(one) for name, one in state.items()}

    def logits(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = functional_call(router, parameters, (hidden,)).logits
        return found

    _, wanted = jvp(logits, (state,), (turned,))
    with torch.no_grad():
        router(hidden)  # fills the cache
        _, found = jvp(logits, (state,), (turned,))
        assert torch.equal(copy.deepcopy(router)(hidden).logits, router(hidden).logits)
    assert wanted.any()
    torch.testing.assert_close(found, wanted)
