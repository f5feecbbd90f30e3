"""Hash routing: the walk over the experts, the balanced table, and gates."""

import math

import pytest
import torch

from pointsman import RoutingContext, build_router
from pointsman.routing import Routing
from tests.library.routers.oracle import DIM, Expected, compare, inputs, router_for, softmax

IDS = torch.arange(21).view(3, 7) * 3 % 64


def routed(spec: str, k: int, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[object, Routing]:
    router = router_for(spec, k).train(k > 1)  # with k = 1 every weight is 1, which training warns of
    return router, router(hidden, RoutingContext(token_ids=IDS, padding_mask=mask))


@pytest.mark.parametrize("experts", [1, 2, 4, 6, 9])
def test_all_experts_are_a_permutation_for_every_id(experts: int) -> None:
    router = build_router("hash", dim=DIM, num_experts=experts, top_k=experts, vocab_size=200)
    ids = torch.arange(200)[None]
    chosen = router(torch.zeros(1, 200, DIM), RoutingContext(token_ids=ids)).experts
    assert torch.equal(chosen.sort(-1).values, torch.arange(experts).expand(200, -1))
    router.top_k = 1
    first = router(torch.zeros(1, 200, DIM), RoutingContext(token_ids=ids)).experts
    assert torch.equal(first, chosen[:, :1])


@pytest.mark.parametrize("gate", ["none", "softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_transcription(k: int, gate: str) -> None:
    hidden, mask = inputs()
    hidden.requires_grad_()
    router, routing = routed(f"hash:gate={gate}", k, hidden, mask)
    score = router.score  # type: ignore[attr-defined]
    experts, weights = [], []
    for h, index, real in zip(hidden.flatten(0, 1), IDS.flatten().tolist(), mask.flatten(), strict=True):
        first, stride = int(score.table[index]), int(score.stride[index])
        assert math.gcd(stride, 6) == 1
        chosen = [(first + j * stride) % 6 for j in range(k)] if real else []
        experts.append(chosen)
        if gate == "none":
            weights.append([torch.tensor(1 / k, dtype=torch.float64) for _ in chosen])
            continue
        z = score.gate.weight @ h
        s = {
            "softmax": softmax(z),
            "sigmoid": 1 / (1 + torch.exp(-z)),
            "sqrtsoftplus": torch.log(1 + torch.exp(z)) ** 0.5,
        }[gate]
        total = sum((s[e] for e in chosen), torch.zeros((), dtype=torch.float64))
        weights.append([s[e] / total for e in chosen])
    if gate == "none":
        assert routing.experts[mask.flatten()].tolist() == [row for row in experts if row]
        assert torch.equal(routing.weights[mask.flatten()], torch.full((19, k), 1 / k, dtype=torch.float64))
    else:
        compare(router, hidden, mask, Expected(experts, weights), routing)  # type: ignore[arg-type]


def test_the_balanced_table_fills_the_lightest_expert_first() -> None:
    router = build_router("hash:kind=balanced", dim=DIM, num_experts=3, top_k=1, vocab_size=7)
    with pytest.raises(ValueError, match="calibrate"):
        router(torch.zeros(1, 2, DIM), RoutingContext(token_ids=torch.zeros(1, 2, dtype=torch.int64)))
    counts = [5, 1, 4, 3, 3, 0, 2]
    router.score.calibrate(counts)
    # 5 -> 0; 4 -> 1; 3 -> 2; 3 -> 2 (3 < 4); 2 -> 1 (4); 1 -> 0 (5); 0 -> 0
    loads = [
        sum(count for count, e in zip(counts, router.score.table.tolist(), strict=True) if e == i) for i in range(3)
    ]
    assert router.score.table.tolist() == [0, 0, 1, 2, 2, 0, 1]
    assert loads == [6, 6, 6]
    other = build_router("hash:kind=balanced", dim=DIM, num_experts=3, top_k=1, vocab_size=7)
    other.load_state_dict(router.state_dict())
    other(torch.zeros(1, 2, DIM), RoutingContext(token_ids=torch.zeros(1, 2, dtype=torch.int64)))


def test_a_table_of_columns_comes_first_and_the_walk_goes_on_without_them() -> None:
    router = build_router("hash:columns=3", dim=DIM, num_experts=8, top_k=8, vocab_size=50)
    table = router.score.table
    assert table.shape == (50, 3)
    assert all(len(set(row)) == 3 for row in table.tolist())
    context = RoutingContext(token_ids=torch.arange(50)[None])
    expected = []
    for index, row in enumerate(table.tolist()):
        order = [(row[0] + j * int(router.score.stride[index])) % 8 for j in range(8)]
        expected.append([*row, *(e for e in order if e not in row)])
    for k in (1, 3, 5, 8):
        router.top_k = k
        chosen = router(torch.zeros(1, 50, DIM), context).experts
        assert chosen.tolist() == [row[:k] for row in expected]
    given = torch.arange(150).view(50, 3) % 8
    router.score.set_table(given)
    router.top_k = 3
    assert torch.equal(router(torch.zeros(1, 50, DIM), context).experts, given)
    for bad, says in (
        (given[:, :2], r"whole numbers \[50, 3\], got \[50, 2\]"),
        (given + 1, "outside 0 to 7"),
        (given * 0, "twice for a token id"),
    ):
        with pytest.raises(ValueError, match=says):
            router.score.set_table(bad)
    for spec, says in (
        ("hash:columns=0", "columns=0: allowed are whole numbers from 1 to 8"),
        ("hash:columns=9", "columns=9: allowed are whole numbers from 1 to 8"),
        ("hash:columns=2:kind=balanced", "kind=balanced makes a table of one column"),
    ):
        with pytest.raises(ValueError, match=says):
            build_router(spec, dim=DIM, num_experts=8, vocab_size=50)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        build_router("hash", dim=DIM, num_experts=4)
    router = build_router("hash", dim=DIM, num_experts=4, vocab_size=10)
    with pytest.raises(ValueError, match="outside 0 to 9"):
        router(torch.zeros(1, 1, DIM), RoutingContext(token_ids=torch.tensor([[10]])))
    with pytest.raises(ValueError, match="token_ids"):
        router(torch.zeros(1, 1, DIM))
    for hidden, shape, says in (((3, 4), (4, 3), "4 x 3"), ((3, 4), (3, 5), "3 x 5"), ((12,), (13,), "1 x 13")):
        told = f"hash: RoutingContext.token_ids is of {says} tokens, the hidden states of {3 if hidden[1:] else 1} x "
        with pytest.raises(ValueError, match=told):
            router(torch.zeros(*hidden, DIM), RoutingContext(token_ids=torch.zeros(shape, dtype=torch.int64)))
    for shape in ((12,), (1, 12), (3, 4)):  # of one sequence, or of several that were flattened
        for spec in ("hash", "mask:visible=2", "stable"):
            other = build_router(spec, dim=DIM, num_experts=4, vocab_size=10)
            other(torch.zeros(12, DIM), RoutingContext(token_ids=torch.zeros(shape, dtype=torch.int64)))
    with pytest.raises(ValueError, match="10 counts"):
        router.score.calibrate([1, 2])
