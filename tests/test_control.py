"""pack_experts on whole layers and models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pointsman import MoE, build_router, pack_experts
from pointsman.experts.cpu import packing
from pointsman.ops.kernels import Kernels, use_kernels


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_decodes_and_trains_on(gated: bool, dtype: torch.dtype) -> None:
    if not packing.works(dtype):
        pytest.skip("oneDNN packs no weights here")
    torch.manual_seed(0)
    layer = MoE(520, 1040, 4, top_k=2, gated=gated).to(dtype)
    use_kernels(layer, Kernels(gemm="onednn"))
    plain = copy.deepcopy(layer)
    weights = [
        weight for weight in (layer.experts.w_in, layer.experts.w_gate, layer.experts.w_out) if weight is not None
    ]
    assert pack_experts(nn.Sequential(layer)) == sum(weight.nbytes for weight in weights)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def check() -> None:
        for tokens in (1, 6, 200):
            hidden = torch.randn(tokens, 520).to(dtype)
            with torch.no_grad():
                torch.testing.assert_close(layer(hidden), plain(hidden), rtol=2e-2, atol=2e-2)

    check()
    layer(torch.randn(8, 520).to(dtype)).float().square().sum().backward()
    optimizer.step()
    plain.load_state_dict(layer.state_dict())
    check()
    assert pack_experts(layer, packed=False) == 0
    assert not any(weight in packing._packs for weight in weights)


def test_float32_that_goes_to_blas_stays_as_it_is() -> None:
    layer = MoE(520, 1040, 2, top_k=1)
    use_kernels(layer, Kernels(gemm="blas"))
    assert pack_experts(layer) == 0


def test_small_experts_stay_as_they_are() -> None:
    assert pack_experts(MoE(16, 32, 4)) == 0


def test_without_experts() -> None:
    with pytest.raises(ValueError, match="pack_experts: Router has no experts"):
        pack_experts(build_router("smoe", dim=8, num_experts=4, top_k=2))
