"""Rotary positions (Su et al. 2021): frequencies, their scaling for longer texts, and the rotation.

Shapes: H heads, S positions, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pointsman._errors import did_you_mean
from pointsman._values import check_whole
from pointsman.ops.linear import transformed

Scaling = Literal["none", "linear", "llama3", "yarn"]
SCALINGS = ("none", "linear", "llama3", "yarn")
FAST = {"llama3": 4.0, "yarn": 32.0}


@dataclass(frozen=True)
class Rotary:
    """Settings of rotary positions, by the names of `DecoderConfig` without `rope_`.

    Attributes:
        head_dim: D.
        theta: base of the frequencies theta^(-2 i / D).
        scaling: "none"; "linear": all frequencies are divided by `factor`; "llama3": those that turn less than `slow`
            times within `length` positions are divided, those that turn more than `fast` times stay, a blend between;
            "yarn" (Peng et al. 2023): the same, blended linearly in the index i.
        factor: see `scaling`.
        length: length of the texts before scaling.
        slow, fast: see `scaling`; fast None = 4 of llama3, 32 of yarn.
        amplitude: cos and sin are multiplied by it; None = 1, of yarn 0.1 ln(factor) + 1.
        whole: yarn's blend begins and ends at whole indices.
    """

    head_dim: int
    theta: float = 10_000.0
    scaling: Scaling = "none"
    factor: float = 1.0
    length: int = 8192
    slow: float = 1.0
    fast: float | None = None
    amplitude: float | None = None
    whole: bool = True

    def __post_init__(self) -> None:
        check_whole("rope_length", self.length)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: allowed are even numbers (rotary positions turn pairs)")
        for name in ("theta", "factor", "slow", "fast", "amplitude"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"rope_{name}={value!r}: allowed are numbers above 0")
        if self.scaling not in SCALINGS:
            raise ValueError(f"rope_scaling={self.scaling!r}: {did_you_mean(str(self.scaling), SCALINGS)}")
        if self.scaling in FAST and not self.slow < self.fast_turns:
            raise ValueError(f"rope_fast={self.fast_turns:g}: allowed are numbers above rope_slow={self.slow:g}")

    @property
    def fast_turns(self) -> float:
        return FAST.get(self.scaling, 1.0) if self.fast is None else self.fast

    @property
    def gain(self) -> float:
        """What cos and sin are multiplied by."""
        if self.amplitude is not None:
            return self.amplitude
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" and self.factor > 1 else 1.0

    def frequencies(self) -> Tensor:
        """[D / 2] float32, in radians a position."""
        even = torch.arange(0, self.head_dim, 2, dtype=torch.float32)
        base = 1.0 / self.theta ** (even / self.head_dim)
        if self.scaling == "none":
            return base
        if self.scaling == "linear":
            return base / self.factor
        if self.scaling == "yarn":
            kept = self._yarn()
        else:
            turns = self.length * base / (2 * math.pi)
            kept = ((turns - self.slow) / (self.fast_turns - self.slow)).clamp(0, 1)
        return base * kept + base / self.factor * (1 - kept)

    def _yarn(self) -> Tensor:
        """[D / 2]: 1 where the frequency stays, 0 where it is divided."""
        first, last = (self._index(turns) for turns in (self.fast_turns, self.slow))
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.head_dim - 1)
        index = torch.arange(self.head_dim // 2, dtype=torch.float32)
        return 1 - ((index - first) / (last - first or 0.001)).clamp(0, 1)

    def _index(self, turns: float) -> float:
        """The index i whose frequency turns so many times within `length` positions."""
        return self.head_dim * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

    def table(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of position * frequency times `gain`, each [positions, D], in the dtype of `like`."""
        exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        places = torch.arange(positions, dtype=exact, device=like.device)
        angles = places[:, None] * self.frequencies().to(places)
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.gain).to(like.dtype), (angles.sin() * self.gain).to(like.dtype)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + D / 2) of heads [B, H, S, D] by their position's angles (cos, sin [at least S, D])."""
    length = heads.shape[2]
    cos, sin = cos[:length], sin[:length]
    if torch.compiler.is_compiling() or transformed():
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat([-second, first], -1) * sin
    if not (torch.is_grad_enabled() and heads.requires_grad):
        return _turned(heads, cos, sin, 1)
    output: Tensor = _Turn.apply(heads, cos, sin)  # type: ignore[no-untyped-call]
    return output


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    output = heads * cos
    half = heads.shape[-1] // 2
    output[..., :half].addcmul_(heads[..., half:], sin[..., :half], value=-sign)
    output[..., half:].addcmul_(heads[..., :half], sin[..., half:], value=sign)
    return output


class _Turn(torch.autograd.Function):
    """Backward turns the gradient the other way: a rotation's transpose."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = cos, sin
        return _turned(heads, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.angles
        return _turned(gradient, cos, sin, -1), None, None
