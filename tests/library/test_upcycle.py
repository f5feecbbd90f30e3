"""upcycle: MoE layers that compute what feed-forward layers of one's own did."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pointsman


class Gated(nn.Module):
    """Names and order that say nothing of what is what."""

    def __init__(self, activation: Any = F.silu, bias: bool = False) -> None:
        super().__init__()
        self.c = nn.Linear(24, 16, bias=bias)
        self.a, self.b = nn.Linear(16, 24, bias=bias), nn.Linear(16, 24, bias=bias)
        self.activation, self.drop = activation, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.drop(self.a(x) * self.activation(self.b(x))))
        return out


def plain(activation: nn.Module, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24, bias=bias), activation, nn.Linear(24, 16))


@pytest.mark.parametrize("mlp", [Gated(), Gated(F.gelu, True), plain(nn.ReLU()), plain(nn.GELU(), False)])
@pytest.mark.parametrize("router", ["smoe", "xmoe", "hyperrouter", "loss-free"])
def test_the_output_is_the_dense_layers_for_every_k(mlp: nn.Module, router: str) -> None:
    hidden = torch.randn(2, 5, 16)
    (moe,) = pointsman.upcycle([mlp.eval()], 4, router)
    assert not moe.training
    assert moe.experts.dropout == (0.1 if isinstance(mlp, Gated) else 0)
    for k in (1, 2, 4):
        pointsman.set_top_k(moe, k)
        torch.testing.assert_close(moe(hidden), mlp(hidden), rtol=1e-5, atol=1e-6)


def test_each_layer_its_own_dtype_mode_and_noise() -> None:
    mlps = [plain(nn.ReLU()), plain(nn.ReLU()).bfloat16().eval(), plain(nn.ReLU()).double()]
    nn.init.normal_(mlps[2][2].weight)  # type: ignore[index, union-attr]
    one, two, three = pointsman.upcycle(mlps, 4)
    assert (one.training, two.training) == (True, False)
    assert two.experts.w_in.dtype == torch.bfloat16
    assert torch.equal(one.experts.w_in[3], mlps[0][0].weight)  # type: ignore[index, union-attr]
    assert torch.equal(three.experts.w_out[1], mlps[2][2].weight)  # type: ignore[index, union-attr]
    (noisy,) = pointsman.upcycle(mlps[:1], 4, noise=0.1)
    far = noisy.experts.w_in - one.experts.w_in
    assert float((far.std() / one.experts.w_in.std()).detach()) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.SiLU()])
def test_weights_that_are_0_tell_activations_apart(activation: nn.Module) -> None:
    mlp = plain(activation)
    nn.init.zeros_(mlp[2].weight)  # type: ignore[index, arg-type]
    (moe,) = pointsman.upcycle([mlp], 4)
    assert moe.experts.activation == type(activation).__name__.lower()


class Narrow(nn.Module):
    """Two linear layers, and not what they give."""

    def __init__(self, ends: Any) -> None:
        super().__init__()
        self.mlp, self.ends = plain(nn.ReLU()), ends

    def forward(self, x: Tensor) -> Any:
        return self.ends(self.mlp(x))


@pytest.mark.parametrize("ends", [lambda y: y[..., :3], lambda y: (y, y)])
def test_an_output_of_another_shape_is_refused(ends: Any) -> None:
    with pytest.raises(ValueError, match="no activation of"):
        pointsman.upcycle([Narrow(ends)], 4)


def test_what_is_no_such_layer_is_refused() -> None:
    for mlps, router, told in (
        ([plain(nn.Tanh())], "smoe", "no activation of"),
        ([nn.Linear(16, 16)], "smoe", "module 0, Linear: allowed are modules of two or three nn.Linear"),
        ([plain(nn.ReLU()), nn.Sequential(plain(nn.ReLU()), nn.LayerNorm(16))], "smoe", "module 1, Sequential"),
        ([plain(nn.ReLU())], "smoe:renormalize=false", "do not sum to 1"),
        ([plain(nn.ReLU())], "hash", "reads more than hidden states"),
        ([plain(nn.ReLU())], "smoe:weigh=input", "'smoe:weigh=input' does not only weigh outputs"),
        ([plain(nn.ReLU())], "soft", "'soft' does not only weigh outputs"),
    ):
        with pytest.raises(ValueError, match=told):
            pointsman.upcycle(mlps, 4, router)
    for _ in range(8):  # whatever is drawn
        with pytest.raises(ValueError, match=r"does not only weigh outputs|do not sum to 1"):
            pointsman.upcycle([plain(nn.ReLU())], 4, "smoe:capacity=2")
    with pytest.raises(ValueError, match="noise=inf"):
        pointsman.upcycle([plain(nn.ReLU())], 4, noise=float("inf"))
    with pytest.raises(ValueError, match="noise=-1"):
        pointsman.upcycle([], 4, noise=-1)
