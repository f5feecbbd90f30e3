"""Two traces compared: planted faults are named, noise is predicted, and nothing is said of equal ones."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from pointsman.traces import MISSING, RoutingTrace
from pointsman_lab.traces import compare, difference, flips
from tests.library.traces.test_traces import EXPERTS, K, random_trace


@pytest.fixture
def trace() -> RoutingTrace:
    """Four sequences of 40 tokens with logits."""
    return random_trace(lengths=(40, 40, 40, 40))


def shifted(trace: RoutingTrace) -> RoutingTrace:
    rows = torch.cat([torch.arange(40).roll(1) + 40 * s for s in range(4)])
    return trace.rows(rows, trace.lengths)


def sequences_exchanged(trace: RoutingTrace) -> RoutingTrace:
    return trace.rows(torch.arange(160).view(4, 40)[torch.tensor([2, 0, 3, 1])].reshape(-1), trace.lengths)


def transposed(trace: RoutingTrace) -> RoutingTrace:
    return trace.rows(torch.arange(160).view(4, 40).t().reshape(-1), trace.lengths)


def layers_misaligned(trace: RoutingTrace) -> RoutingTrace:
    names = trace.layers
    parts = {
        part: {name: getattr(trace, part)[other] for name, other in zip(names, names[1:] + names[:1], strict=True)}
        for part in ("experts", "weights", "logits")
        if getattr(trace, part)
    }
    return replace(trace, **parts)  # type: ignore[arg-type]


def padding_counted(trace: RoutingTrace) -> RoutingTrace:
    rows = torch.cat([torch.cat([torch.arange(40) + 40 * s, torch.full((5,), 40 * s)]) for s in range(4)])
    return trace.rows(rows, trace.lengths + 5)


def padding_of_several_lengths(trace: RoutingTrace) -> RoutingTrace:
    more = torch.tensor([3, 0, 0, 1])  # as many tokens as sequences
    rows = [torch.cat([torch.arange(40) + 40 * s, torch.full((int(n),), 40 * s)]) for s, n in enumerate(more)]
    return trace.rows(torch.cat(rows), trace.lengths + more)


def shifted_and_misaligned(trace: RoutingTrace) -> RoutingTrace:
    return layers_misaligned(shifted(trace))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (shifted, ["shifted by a token (+1)"]),
        (sequences_exchanged, ["sequences in another order"]),
        (transposed, ["batch and sequence exchanged"]),
        (layers_misaligned, ["layers misaligned by -1"]),
        (padding_counted, ["padding is counted"]),
        (padding_of_several_lengths, ["padding is counted"]),
        (shifted_and_misaligned, ["layers misaligned by -1", "shifted by a token (+1)"]),
    ],
)
def test_planted_faults_are_named(
    fault: Callable[[RoutingTrace], RoutingTrace], told: list[str], trace: RoutingTrace
) -> None:
    found = compare(trace, fault(trace))
    assert sorted(found.kinds) == sorted(told)
    assert found.after == 0
    assert found.before > 0.5
    assert flips(*found.undone) == []
    assert compare(trace, trace).kinds == ()


def test_without_token_ids_and_logits_the_faults_are_named_too(trace: RoutingTrace) -> None:
    bare = replace(trace, logits={}, weights={})
    for fault in (shifted, sequences_exchanged, transposed, layers_misaligned, padding_counted):
        assert compare(bare, fault(bare)).kinds == compare(trace, fault(trace)).kinds


def test_the_work_grows_with_the_layers_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 layers, turned and with sequences exchanged, each is compared a few dozen times, not thousands."""
    torch.manual_seed(0)
    chosen = {f"layer.{index}": torch.rand(160, EXPERTS).topk(K).indices for index in range(40)}
    trace = RoutingTrace(chosen, dict.fromkeys(chosen, EXPERTS), torch.full((4,), 40))
    calls = list[None]()
    before = difference.differing
    monkeypatch.setattr(difference, "differing", lambda *two: calls.append(None) or before(*two))
    found = compare(trace, layers_misaligned(sequences_exchanged(trace)))
    assert found.kinds == ("layers misaligned by -1", "sequences in another order")
    assert found.after == 0
    assert len(calls) < 40 * 40


def test_layers_of_several_k_are_compared() -> None:
    torch.manual_seed(0)
    chosen = {f"layer.{k}": torch.rand(160, EXPERTS).topk(k).indices for k in (2, 3)}
    mixed = RoutingTrace(chosen, dict.fromkeys(chosen, EXPERTS), torch.full((4,), 40))
    assert compare(mixed, mixed).equal
    assert compare(mixed, shifted(mixed)).kinds == ("shifted by a token (+1)",)


@pytest.mark.parametrize("std", [1e-3, 1e-2, 5e-2])
def test_noise_of_the_logits_flips_as_many_as_predicted(std: float) -> None:
    trace = random_trace((4000,))
    torch.manual_seed(1)
    noisy = {name: one + std * torch.randn(one.shape) for name, one in trace.logits.items()}
    other = replace(
        trace, logits=noisy, experts={name: one.topk(K).indices.to(torch.int16) for name, one in noisy.items()}
    )
    found = compare(trace, other)
    assert len(found.kinds) == 1
    assert found.kinds[0].startswith("noise of the logits")
    for one in found.layers.values():
        assert one.predicted == pytest.approx(one.differing, rel=0.35, abs=2e-3)
        assert one.margin_differing is not None
        assert one.margin is not None
        assert one.margin_differing < one.margin / 2  # what flips lies near the boundary
    for of in flips(trace, other):
        assert abs(of["flipped"] - of["predicted"]) <= 4 * of["error"] + 2e-3
    assert [of["low"] for of in flips(trace, other)] == sorted(of["low"] for of in flips(trace, other))
    assert flips(trace, trace) == []
    with pytest.raises(ValueError, match="need logits"):
        flips(replace(trace, logits={}), other)


def test_more_than_noise_is_called_so(trace: RoutingTrace) -> None:
    wrong = {name: one.clone() for name, one in trace.experts.items()}
    wrong["layers.1"][:40] = (wrong["layers.1"][:40] + 1) % EXPERTS
    found = compare(trace, replace(trace, experts=wrong))
    assert len(found.kinds) == 1
    assert "more than the noise of the logits predicts: layers.1" in found.kinds[0]
    assert found.kinds[0].startswith(f"other experts for {found.after:.2%} of tokens and layers, ")


def test_layers_in_another_order_are_matched_by_name(trace: RoutingTrace) -> None:
    def turned(number: int) -> RoutingTrace:
        parts = ("experts", "weights", "logits")
        given = {part: dict(reversed(getattr(trace, part).items())) for part in parts}
        wider = {name: torch.nn.functional.pad(one, (0, number - EXPERTS)) for name, one in given["logits"].items()}
        return replace(trace, **{**given, "logits": wider}, num_experts=dict.fromkeys(trace.layers, number))  # type: ignore[arg-type]

    assert compare(trace, turned(EXPERTS)).equal
    with pytest.raises(ValueError, match=f"has {EXPERTS} experts in one trace, {2 * EXPERTS} in the other"):
        compare(trace, turned(2 * EXPERTS))


@pytest.mark.parametrize("hidden", ["both", "one", "layer"])
def test_infinite_logits_have_no_margin(hidden: str, trace: RoutingTrace) -> None:
    """As the router `mask` has them."""

    def masked(trace: RoutingTrace, layers: Sequence[str]) -> RoutingTrace:
        logits = {name: one.clone() for name, one in trace.logits.items()}
        for name in layers:
            logits[name].scatter_(1, logits[name].argmin(-1, keepdim=True), -torch.inf)
        return replace(trace, logits=logits, experts={name: one.topk(K).indices for name, one in logits.items()})

    torch.manual_seed(1)
    noisy = replace(trace, logits={name: one + 0.3 * torch.randn(one.shape) for name, one in trace.logits.items()})
    layers = trace.layers[:1] if hidden == "layer" else trace.layers
    one, other = masked(trace, () if hidden == "one" else layers), masked(noisy, layers)
    found = compare(one, other)
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.after > 0
    assert [name for name, of in found.layers.items() if of.margin is None] == list(layers)
    shown = flips(one, other)
    json.dumps(shown, allow_nan=False)
    assert sum(of["tokens"] for of in shown) == (320 if hidden == "layer" else 0)


def test_unrelated_traces_get_no_explanation(trace: RoutingTrace) -> None:
    found = compare(trace, random_trace((40, 40, 40, 40), seed=7))
    assert len(found.kinds) == 1
    assert "and other logits: layers.0, layers.1, layers.2" in found.kinds[0]


@pytest.mark.parametrize("lengths", [(1,) * 200, (1,) * 196 + (2, 2)])
def test_where_a_shift_leaves_few_tokens_it_explains_nothing(lengths: tuple[int, ...]) -> None:
    a, b = (random_trace(lengths, seed=seed) for seed in (0, 1))
    found = compare(a, b)
    assert [kind.partition(" for ")[0] for kind in found.kinds] == ["other experts"]
    assert found.after == found.before > 0.5


def test_a_missing_choice_is_no_difference(trace: RoutingTrace) -> None:
    gone = {name: one.clone().index_fill_(0, torch.tensor([39, 79]), MISSING) for name, one in trace.experts.items()}
    assert compare(trace, replace(trace, experts=gone)).equal
    gone = {name: torch.full_like(one, MISSING) for name, one in trace.experts.items()}
    with pytest.raises(ValueError, match="no token has recorded experts in both"):
        compare(trace, replace(trace, experts=gone))


def test_traces_of_other_texts_are_refused(trace: RoutingTrace) -> None:
    a = replace(trace, hashes=torch.tensor([1, 2, 3, 4]))
    with pytest.raises(ValueError, match="2 of 4 sequences have other tokens"):
        compare(a, replace(trace, hashes=torch.tensor([1, 5, 6, 4])))
    turned = sequences_exchanged(trace)
    assert compare(a, replace(turned, hashes=torch.tensor([3, 1, 4, 2]))).kinds == ("sequences in another order",)
    assert compare(a, trace).equal  # one of them does not know its tokens
