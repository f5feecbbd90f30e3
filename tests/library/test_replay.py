"""replay_routing: gradients, what is refused, and what is restored."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pointsman import MoE, Routing, record_routing, replay_routing, step_end


def layer(router: str = "smoe", **options: object) -> MoE:
    torch.manual_seed(0)
    return MoE(8, 4, 6, router=router, attach_losses=True, **options).double()  # type: ignore[arg-type]


HIDDEN = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_experts_are_those_given_and_weights_of_now() -> None:
    moe = layer()
    experts = torch.tensor([[5, 0], [1, -1]] * 5)
    with replay_routing(moe, {"": experts}):
        output, routing = moe(HIDDEN, return_routing=True)
    assert torch.equal(routing.experts, experts)
    probs = routing.probs
    wanted = probs[0, [5, 0]] / probs[0, [5, 0]].sum()
    torch.testing.assert_close(routing.weights[0], wanted)
    assert routing.weights[1].tolist() == [1.0, 0.0]
    output.sum().backward()
    assert moe.router.score.weight.grad is not None
    _, free = moe(HIDDEN, return_routing=True)
    assert not torch.equal(free.experts, experts)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_record_replayed_gives_the_same_gradients(checkpointed: bool) -> None:
    model = nn.ModuleDict({"a": layer("loss-free"), "b": layer("smoe:capacity=0.5:renormalize=false")})
    found = []
    with record_routing(model) as records:
        model["b"](model["a"](HIDDEN))
    for replays in (False, True):
        model.zero_grad()
        with replay_routing(model, records if replays else {}):
            if checkpointed:
                output = checkpoint(lambda h: model["b"](model["a"](h)), HIDDEN, use_reentrant=False)
            else:
                output = model["b"](model["a"](HIDDEN))
            output.square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("renormalize", ["true", "false"])
@pytest.mark.parametrize("kind", ["zero", "copy", "constant", "mixed"])
@pytest.mark.parametrize("name", ["smoe", "loss-free"])
def test_virtual_experts_are_chosen_again(name: str, kind: str, renormalize: str) -> None:
    moe = layer(f"{name}:nulls=4:kind={kind}:renormalize={renormalize}:balance=0.1", top_k=3)

    def gradients(replayed: object) -> tuple[list[torch.Tensor], Routing]:
        moe.zero_grad()
        with record_routing(moe) as records, replay_routing(moe, replayed):  # type: ignore[arg-type]
            moe(HIDDEN).square().sum().backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in moe.parameters()]
        return found, records[""]

    wanted, recorded = gradients({})
    virtual = recorded.chosen >= 6
    assert bool(virtual.any())
    assert torch.equal(recorded.experts, recorded.chosen.masked_fill(virtual, -1))
    for replayed in (recorded, recorded.chosen):
        found, again = gradients({"": replayed})
        assert torch.equal(again.chosen, recorded.chosen)
        torch.testing.assert_close(found, wanted)
    with torch.no_grad():  # other scores: the same choice, with their weights
        moe.router.score.weight.normal_()
    step_end(moe)
    _, free = gradients({})
    _, now = gradients({"": recorded})
    assert not torch.equal(free.chosen, recorded.chosen)
    assert torch.equal(now.chosen, recorded.chosen)
    assert not torch.allclose(now.weights, recorded.weights)


def test_a_replay_does_not_choose_what_capacity_dropped() -> None:
    moe = layer("smoe:nulls=2:kind=copy:capacity=0.25:renormalize=false", top_k=3)
    with record_routing(moe) as records:
        output = moe(HIDDEN)
    assert bool((records[""].chosen < 0).any())
    with replay_routing(moe, records):
        torch.testing.assert_close(moe(HIDDEN), output)


def test_counts_of_the_choice_are_not_gathered() -> None:
    moe = layer("loss-free")
    with record_routing(moe) as records:
        moe(HIDDEN)
    with replay_routing(moe, records):
        moe(HIDDEN).sum().backward()
    step_end(moe)
    assert not moe.router.select.bias.any()


def test_an_inner_replay_leaves_the_outer_one() -> None:
    model = nn.ModuleDict({"a": layer(), "b": layer()})
    one, other = (torch.full((10, 1), expert) for expert in (1, 4))
    outer, inner = replay_routing(model, {"a": one}), replay_routing(model, {"a": other, "b": other})
    for _ in range(2):
        with outer:
            with inner, record_routing(model) as inside:
                model["b"](model["a"](HIDDEN))
            with record_routing(model) as records:
                model["b"](model["a"](HIDDEN))
        assert torch.equal(inside["a"].experts, other)
        assert torch.equal(records["a"].experts, one)
        assert records["b"].experts.shape == (10, 2)
        assert model["a"].router.replayed is None


def test_what_is_refused() -> None:
    model = nn.ModuleDict({"block": layer()})
    good = torch.zeros(10, 1, dtype=torch.int64)
    for experts, message in (
        ({"blok": good}, "no layer 'blok'.*block"),
        ({"block": good.float()}, r"int64 \[tokens, k\], got torch.float32"),
        ({"block": good[0]}, r"got torch.int64 \[1\]"),
        ({"block": [[0]]}, "got list"),
        ({"block": good + 6}, "allowed experts are 0 to 5, and -1"),
        ({"block": good.expand(10, 2)}, "a token has an expert twice"),
    ):
        with pytest.raises(ValueError, match=message):
            replay_routing(model, experts)  # type: ignore[arg-type]
    with replay_routing(model, {"block": good[:4]}), pytest.raises(ValueError, match="of 4 tokens, the input of 10"):
        model["block"](HIDDEN)
    one = layer().router
    shared = nn.ModuleDict({name: MoE(8, 4, 6, router=one).double() for name in "ab"})
    for refused in (lambda: record_routing(shared), lambda: replay_routing(shared, {"a": good})):
        with pytest.raises(ValueError, match="layers 'a' and 'b' share a router"):
            refused()
    with pytest.raises(ValueError, match="allowed experts are 0 to 7"):
        replay_routing(layer("smoe:nulls=2"), {"": good + 8})
    for router in ("sparsemixer", "soft"):
        moe = layer(router)
        with replay_routing(moe, {"": good}), pytest.raises(ValueError, match=router):
            moe(HIDDEN)
    assert model["block"].router.replayed is None


def test_forced_balance() -> None:
    moe = layer("forced", top_k=3)
    _, routing = moe(HIDDEN, return_routing=True)
    assert routing.experts.flatten().bincount().tolist() == [5] * 6
    assert routing.experts[0].tolist() == [0, 1, 2]
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(10, dtype=torch.float64))
