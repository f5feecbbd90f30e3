"""The measured cases: shapes of training configurations, decoding, and scaling along each axis."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import product


@dataclass(frozen=True)
class Case:
    """One layer and one batch.

    Attributes:
        tokens: rows of a batch; peers that need sequences get sequences of 512 tokens, or one shorter sequence.
        dim, hidden_dim, num_experts, k: the layer; experts are ReLU, without biases.
        dtype: "float32" or "bfloat16".
        train: forward and backward, or forward alone (decoding).
    """

    name: str
    tokens: int
    dim: int
    hidden_dim: int
    num_experts: int
    k: int
    dtype: str = "float32"
    train: bool = True
    device: str = "cpu"

    @property
    def label(self) -> str:
        layer = f"d {self.dim}, hidden {self.hidden_dim}, {self.num_experts} experts, k {self.k}, {self.dtype}"
        return f"{self.name}: {self.tokens} tokens, {layer}, forward{' + backward' if self.train else ''}"

    @property
    def operations(self) -> int:
        """Floating-point operations of the two matrix products of each assignment."""
        return 4 * self.tokens * self.k * self.dim * self.hidden_dim * (3 if self.train else 1)


A = Case("a", 11264, 256, 512, 16, 2)
TRAINING = (
    A,
    replace(A, tokens=2048, k=1),
    replace(A, tokens=2048, k=2),
    replace(A, k=16),
    Case("b", 4096, 352, 352, 16, 2),
    Case("c", 2048, 768, 3072, 32, 1),
)
DECODING = (
    *(Case("decode", tokens, 1024, 2048, 64, 8, train=False) for tokens in (1, 4, 32)),
    *(Case("decode-small", tokens, 256, 512, 16, 2, train=False) for tokens in (1, 4, 32)),
)
ON_GPU = tuple(
    Case(
        f"gpu-{dim}x{factor * dim}-e{num_experts}-k{k}",
        32768,
        dim,
        factor * dim,
        num_experts,
        k,
        "bfloat16",
        device="cuda",
    )
    for dim, factor, num_experts, k in product((1024, 2048), (2, 4), (16, 64), (2, 8))
)
STEPS = "steps"
STEPS_TOP_K = (2, 8)
"""Training steps of a whole model on a GPU (`steps.py`), at these k."""


ROUTERS = "routers"
"""Every router's share of configuration a."""

GPU = "gpu"
"""All cases on a GPU."""

NAMES = tuple(dict.fromkeys([*(case.name for case in (*TRAINING, *DECODING, *ON_GPU)), GPU, ROUTERS, STEPS]))


def cases(device: str, quick: bool, names: Collection[str] | None = None) -> list[Case]:
    """The cases for a device, on a CPU in both dtypes; a few if `quick`; only those in `names` if given."""
    if device != "cpu":
        chosen = [replace(case, device=device) for case in ON_GPU]
        chosen = chosen[:1] if quick else chosen
    else:
        both = (A, DECODING[0]) if quick else (*TRAINING, *DECODING)
        chosen = [replace(case, dtype=dtype) for case in both for dtype in ("float32", "bfloat16")]
    if names is None or (GPU in names and device != "cpu"):
        return chosen
    return [case for case in chosen if case.name in names]


def router_cases(device: str, names: Collection[str] | None = None) -> list[Case]:
    """Where routers are measured: configuration a, on a CPU, in float32 (in bf16 every call builds kernels anew)."""
    wanted = names is None or ROUTERS in names or A.name in names
    return [A] if wanted and device == "cpu" else []


def steps(device: str, quick: bool, names: Collection[str] | None = None) -> tuple[int, ...]:
    """The values of k at which training steps are measured: only on a GPU, and not if `quick`."""
    wanted = not quick if names is None else STEPS in names
    return STEPS_TOP_K if wanted and device != "cpu" else ()


def growth() -> dict[str, dict[int, Case]]:
    """Axis -> value -> case: each axis alone around configuration a, in float32."""
    return {
        "tokens": {1 << power: replace(A, tokens=1 << power) for power in range(8, 16)},
        "experts": {1 << power: replace(A, num_experts=1 << power) for power in range(2, 9)},
        "k": {k: replace(A, k=k) for k in (1, 2, 4, 8, 16)},
    }
