"""Nothing looks ahead: routers with mixers, whole, in segments, a token at a time; the head's state."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import pointsman
from pointsman import AttentionTrace, MoE, RoutingContext, build_router
from pointsman.ops.relative import RelativeBias
from pointsman.ops.visible import Visible
from pointsman.routers.mutual.posterior import head_entropies
from pointsman.routing import Routing

B, T, DIM, EXPERTS, HEADS, WIDTH = 2, 9, 8, 5, 2, 4
MIXERS = [
    "similarity",
    "similarity:source=input:learned=true",
    "similarity:source=attention",
    "similarity:neighbours=lower-entropy",
    "attention",
    "attention:heads=all",
    "attention:neighbours=lower-entropy:sigma=0.5",
    "similarity:strength=0.4",
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def trace(hidden: Tensor, start: int = 0, stop: int | None = None) -> AttentionTrace:
    """Causal attention over `hidden`; the queries are those of the tokens `start:stop`, the keys all before them."""
    stop = hidden.shape[1] if stop is None else stop
    projections = [draw(HEADS, DIM, WIDTH, seed=seed) / 2 for seed in range(3)]
    query, key, value = (torch.einsum("btd,hdw->bhtw", hidden[:, :stop], projection) for projection in projections)
    out_weight = draw(HEADS, WIDTH, DIM, seed=5) / 2
    scores = (query @ key.transpose(2, 3)) * WIDTH**-0.5
    scores = scores.masked_fill(torch.ones(stop, stop, dtype=torch.bool).triu(1), -torch.inf)
    output = torch.einsum("bhtw,hwd->btd", torch.softmax(scores, -1) @ value, out_weight)
    return AttentionTrace(query[:, :, start:], key, value, out_weight, output[:, start:], WIDTH**-0.5)


def build(mixer: str, router: str = "smoe") -> pointsman.Router:
    torch.manual_seed(1)
    built = build_router(f"{router}+{mixer}", dim=DIM, num_experts=EXPERTS).double().eval()
    if router == "smoe":
        with torch.no_grad():
            built.score.weight.mul_(50)  # decided tokens: mixing then moves much
    return built


def whole(router: pointsman.Router, hidden: Tensor, mask: Tensor | None = None) -> Routing:
    return router(hidden, RoutingContext(attention=trace(hidden), padding_mask=mask))


def in_pieces(router: pointsman.Router, hidden: Tensor, cuts: list[int], mask: Tensor | None = None) -> list[Routing]:
    found, past, start = [], None, 0
    for stop in cuts:
        piece = None if mask is None else mask[:, start:stop]
        context = RoutingContext(attention=trace(hidden, start, stop), padding_mask=piece, past=past)
        found.append(router(hidden[:, start:stop], context))
        past, start = found[-1].carry, stop
    return found


def joined(pieces: list[Routing]) -> Tensor:
    return torch.cat([piece.probs.view(B, -1, EXPERTS) for piece in pieces], 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cuts", [list(range(1, T + 1)), [4, T], [1, 2, 7, T]])
@pytest.mark.parametrize("mixer", MIXERS)
def test_pieces_equal_the_whole(mixer: str, cuts: list[int], padded: bool) -> None:
    router, hidden, mask = build(mixer), draw(B, T, DIM), None
    if padded:
        mask = torch.ones(B, T, dtype=torch.bool)
        mask[0, :2], mask[1, 5:] = False, False
    together = whole(router, hidden, mask).probs.view(B, T, EXPERTS)
    torch.testing.assert_close(joined(in_pieces(router, hidden, cuts, mask)), together)
    bare = build_router("smoe", dim=DIM, num_experts=EXPERTS).double()
    bare.score.load_state_dict(router.score.state_dict())
    assert not torch.allclose(together, bare(hidden).probs.view(B, T, EXPERTS), atol=1e-3)


@pytest.mark.parametrize("padded", [0, 1])
def test_padding_in_one_segment_and_none_in_another(padded: int) -> None:
    router, hidden = build("similarity"), draw(B, T, DIM)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, (1, 6)[padded]] = False
    past, found = None, []
    for index, (start, stop) in enumerate([(0, 4), (4, T)]):
        piece = mask[:, start:stop] if index == padded else None
        found.append(router(hidden[:, start:stop], RoutingContext(padding_mask=piece, past=past)))
        past = found[-1].carry
    torch.testing.assert_close(joined(found), whole(router, hidden, mask).probs.view(B, T, EXPERTS))


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("router", ["smoe", "xmoe", "hyperrouter"])
def test_the_future_and_other_sequences_change_nothing(mixer: str, router: str) -> None:
    built, hidden = build(mixer, router), draw(B, T, DIM)
    before = whole(built, hidden).probs.view(B, T, EXPERTS)
    for t in range(T - 1):
        other = hidden.clone()
        other[:, t + 1] += 3 * draw(B, DIM, seed=t)
        after = whole(built, other).probs.view(B, T, EXPERTS)
        torch.testing.assert_close(after[:, : t + 1], before[:, : t + 1], atol=0, rtol=1e-12)
        assert not torch.allclose(after[:, t + 1 :], before[:, t + 1 :])
    other = hidden.clone()
    other[1] += 1
    torch.testing.assert_close(whole(built, other).probs.view(B, T, EXPERTS)[0], before[0], atol=0, rtol=1e-12)


def test_the_papers_choice_of_a_head_looks_ahead() -> None:
    built, hidden = build("attention:heads=lowest-entropy-sequence"), draw(B, T, DIM)
    assert not built.causal
    before, moved = whole(built, hidden).probs.view(B, T, EXPERTS), False
    for seed in range(10):
        other = hidden.clone()
        other[:, T // 2 :] = 4 * draw(B, T - T // 2, DIM, seed=seed)
        after = whole(built, other).probs.view(B, T, EXPERTS)
        moved = moved or not torch.allclose(after[:, : T // 2], before[:, : T // 2])
    assert moved


def exact_entropies(hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean entropy over real tokens of each head's attention, [H]."""
    seen = trace(hidden)
    total, count = torch.zeros(HEADS, dtype=torch.float64), 0
    for b in range(B):
        for i in range(hidden.shape[1]):
            if mask is not None and not mask[b, i]:
                continue
            allowed = [j for j in range(i + 1) if mask is None or mask[b, j]]
            for h in range(HEADS):
                p = torch.softmax(
                    torch.stack([seen.query[b, h, i] @ seen.key[b, h, j] for j in allowed]) * WIDTH**-0.5, 0
                )
                total[h] -= (p * p.log()).sum()
            count += 1
    return total / count


def test_the_head_is_a_running_mean_taken_over_in_step_end() -> None:
    torch.manual_seed(0)
    layer = MoE(DIM, 8, EXPERTS, router="smoe+attention").double()
    mix = layer.router.mix
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    expected: Tensor | None = None
    for step in range(3):
        means = []
        for micro in range(2):
            hidden = draw(B, T, DIM, seed=10 * step + micro) * (1 + step)
            mask = torch.ones(B, T, dtype=torch.bool)
            mask[micro, 6:] = False
            means.append((exact_entropies(hidden, mask), int(mask.sum())))
            before = mix.head_entropy.clone()
            run = layer if micro else lambda *args: checkpoint(layer, *args, use_reentrant=False)
            run(
                hidden.requires_grad_(), RoutingContext(padding_mask=mask, attention=trace(hidden.detach()))
            ).sum().backward()
            assert torch.equal(mix.head_entropy, before)
        optimizer.step()
        pointsman.step_end(layer)
        mean = sum(value * count for value, count in means) / sum(count for _, count in means)
        expected = mean if expected is None else expected + (mean - expected) / (step + 1)
        torch.testing.assert_close(mix.head_entropy, expected)
    hidden = draw(B, T, DIM)
    layer.eval()
    layer(hidden, RoutingContext(attention=trace(hidden)))
    pointsman.step_end(layer)
    torch.testing.assert_close(mix.head_entropy, expected)
    chosen = layer.router(hidden, RoutingContext(attention=trace(hidden))).probs
    with torch.no_grad():
        mix.head_entropy.copy_(torch.zeros(HEADS).index_fill_(0, expected.argmin(), -1))
    torch.testing.assert_close(layer.router(hidden, RoutingContext(attention=trace(hidden))).probs, chosen)
    with torch.no_grad():
        mix.head_entropy.neg_()
    assert not torch.allclose(layer.router(hidden, RoutingContext(attention=trace(hidden))).probs, chosen)


@pytest.mark.parametrize("first", [True, False])
def test_attention_that_overflowed_in_a_skipped_step_chooses_no_head(first: bool) -> None:
    layer, seen = MoE(DIM, 4, EXPERTS, router="attention").double(), draw(B, T, DIM)
    for bad in (True, False) if first else (False, True):
        before = layer.router.mix.head_entropy
        given = trace(seen)
        given = replace(given, query=given.query * torch.inf) if bad else given
        layer(seen.requires_grad_(), RoutingContext(attention=given)).sum().backward()
        layer.zero_grad()
        pointsman.step_end(layer)
        assert not bad or not before.numel() or torch.equal(layer.router.mix.head_entropy, before)
    assert int(layer.router.mix.head_steps) == 1
    assert bool(layer.router.mix.head_entropy.isfinite().all())
    assert layer.router.mix.head_entropy.any()


@pytest.mark.parametrize("mixer", [*MIXERS, "similarity:strength=0:learned=true"])
def test_a_rank_without_sequences_has_gradients_and_statistics_as_the_others(mixer: str) -> None:
    """Ranks add them up, so they need one shape on all. A step of no token, or of padding alone, moves no state."""
    found, layer = [], MoE(DIM, 4, EXPERTS, router=f"smoe+{mixer}").double()
    for count, real in ((B, True), (B, False), (0, True)):
        one, hidden = copy.deepcopy(layer), draw(B, T, DIM)[:count]
        mask = torch.full((count, T), real)
        one(hidden, RoutingContext(attention=trace(hidden), padding_mask=mask)).sum().backward()
        names = [name for name, parameter in one.named_parameters() if parameter.grad is not None]
        found.append((names, [value.shape for value in one.router.gathered()]))
        pointsman.step_end(one)
        assert (real and count) or not getattr(one.router.mix, "head_steps", None)
    assert found[0] == found[1] == found[2]


def test_the_state_travels_with_the_checkpoint() -> None:
    one, two = (build_router("attention", dim=DIM, num_experts=EXPERTS) for _ in range(2))
    one.mix.head_entropy = torch.tensor([2.0, 1.0, 3.0])
    one.mix.head_steps += 7
    two.load_state_dict(one.state_dict())
    assert torch.equal(two.mix.head_entropy, one.mix.head_entropy)
    assert two.mix.head_steps == 7
    one.to(torch.bfloat16)
    assert one.mix.head_entropy.dtype == one.mix.sigma.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_sized_by_hand_can_be_paired_before_the_first_step(tmp_path: Path) -> None:
    """As "Your own training loop" says: same bits, and `AveragedModel` and distributed checkpoints take it."""
    draw_layer = partial(MoE, DIM, 4, EXPERTS, router="attention")
    plain = draw_layer()
    sized, empty = copy.deepcopy(plain), draw_layer()
    for one in (sized, empty):
        one.router.mix.head_entropy = torch.zeros(HEADS)
    averages = [AveragedModel(one) for one in (plain, sized)]
    for layer in (plain, sized):
        layer(draw(B, T, DIM).float(), RoutingContext(attention=trace(draw(B, T, DIM)))).sum().backward()
        pointsman.step_end(layer)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, sized.state_dict()[name]), name
    averages[1].update_parameters(sized)
    assert torch.equal(averages[1].module.router.mix.head_entropy, sized.router.mix.head_entropy)
    with pytest.raises(RuntimeError, match="size of tensor"):
        averages[0].update_parameters(plain)
    dcp.save(sized.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    dcp.load(state := empty.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["router.mix.head_entropy"], sized.router.mix.head_entropy)


@pytest.mark.slow
def test_long_sequences_are_sampled() -> None:
    torch.manual_seed(0)
    router = build_router("attention", dim=DIM, num_experts=EXPERTS).double()
    hidden = draw(B, 200, DIM)
    statistics = router(hidden, RoutingContext(attention=trace(hidden))).statistics
    assert statistics["mix.head_tokens"] == B * 16
    mean = statistics["mix.head_entropy"] / statistics["mix.head_tokens"]
    torch.testing.assert_close(mean, exact_entropies(hidden), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("bias", ["none", "relative", "opaque"])
def test_the_sample_is_four_blocks_of_four_rows_of_about_four_sequences(bias: str) -> None:
    batch, length = 9, 30
    query, key = draw(batch, HEADS, length, WIDTH), draw(batch, HEADS, length, WIDTH, seed=1)
    positions, content, position = draw(HEADS, length, WIDTH), draw(HEADS, WIDTH), draw(HEADS, WIDTH, seed=2)
    native = RelativeBias(query, key, positions, content, position, 0.5)
    function = {"none": None, "relative": native, "opaque": lambda *rows: native(*rows)}[bias]
    seen = AttentionTrace(query, key, key, draw(HEADS, WIDTH, DIM), draw(batch, length, DIM), 0.5, function)
    real = torch.ones(batch, length, dtype=torch.bool)
    real[2, :5] = False
    expected, rows = torch.zeros(HEADS, dtype=torch.float64), 0
    for b in (0, 2, 4, 6, 8):
        for i in (*range(3, 7), *range(11, 15), *range(18, 22), *range(26, 30)):
            if not real[b, i]:
                continue
            rows += 1
            for h in range(HEADS):
                scores = []
                for j in range(i + 1):
                    if real[b, j]:
                        score = query[b, h, i] @ key[b, h, j]
                        if bias != "none":
                            score = score + content[h] @ key[b, h, j]
                            score = score + (query[b, h, i] + position[h]) @ positions[h, length - 1 - (i - j)]
                        scores.append(0.5 * score)
                expected[h] += torch.special.entr(torch.softmax(torch.stack(scores), 0)).sum()
    sums, counts = head_entropies(seen, Visible(length, length, real=real), sample=True)
    assert counts.sum() == rows
    torch.testing.assert_close(sums.sum(0), expected)
