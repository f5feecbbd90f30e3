"""Rotary positions (Su et al. 2021): frequencies, their scaling for longer texts, and the rotation.

Shapes: H heads, S positions, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pointsman._errors import did_you_mean
from pointsman._values import check_whole
from pointsman.ops.linear import transformed
from pointsman_lab.models.memory import appended

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
        """cos and sin of position * frequency times `gain`, each [positions, D], in the dtype of `like`.

        sin is negative for the first D / 2, where a rotation subtracts.
        """
        exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        places = torch.arange(positions, dtype=exact, device=like.device)
        angles = places[:, None] * self.frequencies().to(places)
        cos, sin = ((one * self.gain).to(like.dtype) for one in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


class Turns:
    """Turns the pairs (i, i + D / 2) of heads by the angles of their positions, in one forward of a model.

    Args:
        cos, sin: [positions, D], from `Rotary.table`.
        turned: the remembered keys [B, M, G, D] of each layer, turned already; () = they are not.

    Attributes:
        keys_turned: without gradients the keys [B, M + T, G, D] of each layer, as they are called for.
    """

    def __init__(self, cos: Tensor, sin: Tensor, turned: Sequence[Tensor] = ()) -> None:
        self.tables, self.turned = (cos, sin), turned
        self.keys_turned: list[Tensor] = []
        self._wide: tuple[Tensor, Tensor] | None = None

    def keys(self, keys: Tensor) -> Tensor:
        """All keys [B, S, G, D] of the next layer, from position 0 on."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self(keys, 0)
        if self.turned:
            before = self.turned[len(self.keys_turned)]
            length = before.shape[1]
            keys = appended(before, self(keys[:, length:], length))
        else:
            keys = self(keys, 0)
        self.keys_turned.append(keys)
        return keys

    def __call__(self, heads: Tensor, first: int) -> Tensor:
        """heads [B, S, H, D], whose first stands at position `first`."""
        stop, half = first + heads.shape[1], heads.shape[-1] // 2
        if torch.compiler.is_compiling() or transformed():
            cos, sin = (table[first:stop, None] for table in self.tables)
            return heads * cos + heads.roll(half, -1) * sin
        cos, sin = self._of(heads, first, stop)
        if not (torch.is_grad_enabled() and heads.requires_grad):
            return _turned(heads, cos, sin, 1)
        output: Tensor = _Turn.apply(heads, cos, sin)  # type: ignore[no-untyped-call]
        return output

    def _of(self, heads: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin for these heads, [S, 1, D]; or [S, H D]: a row for all heads of a position is faster."""
        count, width = heads.shape[2:]
        if not FEW <= heads.numel() <= SMALL:
            return self.tables[0][first:stop, None], self.tables[1][first:stop, None]
        if self._wide is None or self._wide[0].shape[1] < count * width:
            self._wide = self.tables[0].repeat(1, count), self.tables[1].repeat(1, count)
        return self._wide[0][first:stop, : count * width], self._wide[1][first:stop, : count * width]


FEW, SMALL = 1 << 14, 1 << 19
"""Elements: from the first on wide tables are worth their making; up to the second is a copy of the heads."""


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = heads.shape[-1] // 2
    if cos.dim() == 2:
        swapped = heads.roll(half, -1).flatten(2)
        return (heads.flatten(2) * cos).addcmul_(swapped, sin, value=sign).view(heads.shape)
    output = heads * cos
    if heads.numel() <= SMALL:
        return output.addcmul_(heads.roll(half, -1), sin, value=sign)
    output[..., :half].addcmul_(heads[..., half:], sin[..., :half], value=sign)
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
