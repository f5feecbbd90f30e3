"""Plain attention against softmax written out in float64, with masks, a cache, grouped heads and a bias."""

import pytest
import torch
from torch import Tensor, nn

from pointsman_lab.models import attention as room
from pointsman_lab.models.attention import Attention

B, T, M, DIM, H, D = 2, 7, 3, 12, 4, 6


def naive(module: Attention, hidden: Tensor, before: Tensor, sees: Tensor, bias: Tensor) -> Tensor:
    heads, groups = module.num_heads, module.num_heads // module.kv_heads
    query = module.query(hidden).view(B, T, heads, D).transpose(1, 2)
    seen = torch.cat([before, hidden], 1)
    key = module.key(seen).view(B, -1, module.kv_heads, D).transpose(1, 2).repeat_interleave(groups, 1)
    value = module.value(seen).view(B, -1, module.kv_heads, D).transpose(1, 2).repeat_interleave(groups, 1)
    scores = (query @ key.mT * D**-0.5 + bias).masked_fill(~sees, -torch.inf)
    return module.output((scores.softmax(-1) @ value).transpose(1, 2).reshape(B, T, heads * D))


@pytest.mark.parametrize("rows", [3, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("past", [0, M])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_softmax(
    monkeypatch: pytest.MonkeyPatch, rows: int, causal: bool, padded: bool, past: int, biased: bool
) -> None:
    monkeypatch.setattr(room, "ROWS", rows)
    torch.manual_seed(0)
    module = Attention(DIM, H, D, kv_heads=2).double()
    hidden, before = torch.randn(B, T, DIM).double().requires_grad_(), torch.randn(B, past, DIM).double()
    memory = torch.cat([module.key(before), module.value(before)], -1)
    keys = past + T
    mask = torch.ones(B, keys, dtype=torch.bool)
    if padded:
        mask[0, -2:] = False
        mask[1, :1] = False
    own = torch.arange(T)[:, None] + past
    place = torch.arange(keys)
    sees = ((place <= own) if causal else torch.ones(T, keys, dtype=torch.bool)) & mask[:, None, :]
    if causal:
        sees = sees | (place == own)
    table = torch.randn(1, H, T, keys).double() if biased else torch.zeros(1, H, T, keys).double()
    expected = naive(module, hidden, before, sees[:, None], table)
    [wanted] = torch.autograd.grad(expected.square().sum(), hidden)
    got, kept, _ = module(
        hidden, keep=True, memory=memory, key_mask=mask if padded else None, causal=causal,
        bias=(lambda start, stop: table[:, :, start:stop]) if biased else None,
    )  # fmt: skip
    real = mask[:, past:]
    # a padded query sees itself, or what the others see: nobody reads it
    torch.testing.assert_close(got[real], expected[real])
    [found] = torch.autograd.grad(got[real].square().sum() * 1.0, hidden)
    [wanted] = torch.autograd.grad(naive(module, hidden, before, sees[:, None], table)[real].square().sum(), hidden)
    torch.testing.assert_close(found, wanted)
    assert kept is not None
    assert not kept.requires_grad
    torch.testing.assert_close(kept, torch.cat([memory, torch.cat([module.key(hidden), module.value(hidden)], -1)], 1))


def test_the_trace_is_the_attention_without_the_last_bias() -> None:
    torch.manual_seed(0)
    module, hidden = Attention(DIM, H, D, kv_heads=2).double(), torch.randn(B, T, DIM).double()
    output, _, trace = module(hidden, causal=True, trace=True)
    assert trace is not None
    assert trace.causal
    torch.testing.assert_close(trace.output + module.output.bias, output)
    assert trace.side_by_side is not None
    blocks = torch.einsum("bthd,hdo->bto", trace.side_by_side.view(B, T, H, D), trace.out_weight)
    torch.testing.assert_close(blocks, trace.output)
    scores = trace.query @ trace.key.mT * trace.scale
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    mixed = (scores.softmax(-1) @ trace.value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixed, trace.side_by_side)


def test_keys_can_come_from_elsewhere() -> None:
    module = Attention(DIM, H, D, qk_norm=nn.RMSNorm).double()
    hidden, source = torch.randn(B, T, DIM).double(), torch.randn(B, 4, DIM).double()
    output, new, _ = module(hidden, source=source, keep=True)
    assert new is not None
    assert (output.shape, new.shape) == ((B, T, DIM), (B, 4, 2 * H * D))
    torch.testing.assert_close(module(hidden[:, :2], source=source)[0], output[:, :2])
