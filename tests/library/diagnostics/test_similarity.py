import numpy as np
import pytest
import torch

from pointsman.diagnostics import OutputSimilarity
from pointsman.experts.modules import Experts
from tests.library.diagnostics.helpers import part, random_routing, same


def outputs(experts, hidden):
    """Every expert on every token, by the formula, [E][tokens, dim] in float64."""
    h = hidden.double()
    p = {name: value.detach().double() for name, value in experts.named_parameters()}
    return [
        torch.relu(h @ p["w_in"][e].T + p["b_in"][e]) @ p["w_out"][e].T + p["b_out"][e]
        for e in range(experts.num_experts)
    ]


def hsic(x, y):
    """Unbiased HSIC, Song et al. 2012, Eq. 5, with linear kernels."""
    n = len(x)
    k, q = (x @ x.T).numpy(), (y @ y.T).numpy()
    np.fill_diagonal(k, 0)
    np.fill_diagonal(q, 0)
    ones = np.ones(n)
    inner = np.trace(k @ q) + (ones @ k @ ones) * (ones @ q @ ones) / ((n - 1) * (n - 2))
    return (inner - 2 / (n - 2) * ones @ k @ q @ ones) / (n * (n - 3))


def test_equal_experts_have_similarity_one():
    experts = Experts(6, 10, 3)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter))
    diagnostic = OutputSimilarity(experts)
    diagnostic.update(random_routing(30, 3, 1), hidden=torch.randn(30, 6))
    found = diagnostic.result()
    assert found["cosine_mean"] == pytest.approx(1)
    assert found["cka_mean"] == pytest.approx(1)


def test_outputs_against_the_definitions():
    experts = Experts(6, 10, 3)
    hidden = torch.randn(40, 6)
    diagnostic = OutputSimilarity(experts)
    diagnostic.update(random_routing(40, 3, 1), hidden=hidden)
    found = diagnostic.result()
    made = outputs(experts, hidden)
    for i in range(3):
        for j in range(3):
            cosine = torch.cosine_similarity(made[i], made[j], dim=-1).mean()
            assert found["cosine"][i][j] == pytest.approx(float(cosine), abs=1e-6)
            cka = hsic(made[i], made[j]) / np.sqrt(hsic(made[i], made[i]) * hsic(made[j], made[j]))
            assert found["cka"][i][j] == pytest.approx(cka, abs=1e-5)


def test_rotated_outputs_are_alike_by_cka():
    experts = Experts(6, 32, 2, bias=False)
    turn = torch.linalg.qr(torch.randn(6, 6)).Q
    with torch.no_grad():
        experts.w_in[1] = experts.w_in[0]
        experts.w_out[1] = 3 * turn @ experts.w_out[0]
    diagnostic = OutputSimilarity(experts)
    diagnostic.update(random_routing(60, 2, 1), hidden=torch.randn(60, 6))
    found = diagnostic.result()
    assert found["cka_mean"] == pytest.approx(1, abs=1e-5)
    assert found["cosine_mean"] < 0.9


def test_padding_counts_nothing_shards_equal_one_pass_and_tokens_are_capped():
    experts = Experts(6, 10, 3, dropout=0.5).train()
    routing, hidden = random_routing(60, 3, 1), torch.randn(60, 6)
    mask = torch.rand(60) < 0.7
    pieces = [slice(0, 25), slice(25, 60)]
    whole, shards = OutputSimilarity(experts, most=8), OutputSimilarity(experts, most=8)
    for rows in pieces:
        whole.update(part(routing, rows), mask[rows], hidden=hidden[rows])
        keep = mask[rows]
        shard = OutputSimilarity(experts, most=8)
        spoiled = torch.where(keep[:, None], hidden[rows], torch.nan)
        shard.update(part(routing, rows), keep, hidden=spoiled)
        shards.merge(shard)
    assert whole.result()["tokens"] == 16
    assert same(whole.result(), shards.result())
    assert experts.training


def test_too_few_tokens_give_none_not_nan():
    diagnostic = OutputSimilarity(Experts(6, 10, 3))
    assert diagnostic.result()["cka_mean"] is None
    diagnostic.update(random_routing(2, 3, 1), hidden=torch.randn(2, 6))
    found = diagnostic.result()
    assert found["cka_mean"] is None
    assert found["cosine_mean"] is not None
    assert same(found, found)
