"""The layer's implementations: ours, its limit and its peers, each a function of hidden states [tokens, dim].

Peers use their own routers. All experts do the same work: ReLU, no biases.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.layer import MoE

Layer = Callable[[Tensor], Tensor]
Built = tuple[Layer, nn.Module]
LIMIT = "limit"


@dataclass(frozen=True)
class Case:
    """One layer and one batch."""

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


@dataclass(frozen=True)
class Implementation:
    """How to build a layer, and for which cases."""

    build: Callable[[Case], Built]
    package: str | None = None
    suits: Callable[[Case], bool] = lambda case: True

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


def pointsman(case: Case) -> Built:
    layer = MoE(case.dim, case.hidden_dim, case.num_experts, top_k=case.k, router="smoe:bias=false", bias=False)
    return layer, layer


def limit(case: Case) -> Built:
    """The same matrix products as a dense chain, in chunks that fit in cache."""
    rows = case.tokens * case.k
    chunk = rows if case.device != "cpu" else min(rows, 2048)
    inward = torch.randn(case.hidden_dim, case.dim) / case.dim**0.5
    outward = torch.randn(case.dim, case.hidden_dim) / case.hidden_dim**0.5
    module = nn.ParameterList([inward, outward, torch.randn(chunk, case.dim)])

    def layer(hidden: Tensor) -> Tensor:
        with torch.no_grad():
            for start in range(0, rows, chunk):
                part = module[2][: min(chunk, rows - start)]
                F.linear(F.linear(part, module[0]).relu_(), module[1])
        return hidden

    return layer, module


class EightLines(nn.Module):
    """Sort, two grouped products, weighted sum: what one writes without a library.

    `as_linear`: weights lie in memory as `nn.Linear` and checkpoints have them, [E, out, in], and as ours do.
    """

    def __init__(self, dim: int, hidden: int, experts: int, k: int, as_linear: bool) -> None:
        super().__init__()
        self.router, self.k, self.num_experts = nn.Linear(dim, experts, False), k, experts
        w_in, w_out = torch.randn(experts, dim, hidden) / dim**0.5, torch.randn(experts, hidden, dim) / hidden**0.5
        self.w_in, self.w_out = (nn.Parameter(w.mT.contiguous().mT if as_linear else w) for w in (w_in, w_out))

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)  # [N, dim]
        logits, experts = self.router(rows).topk(self.k, -1)  # [N, k]
        order = experts.flatten().argsort(stable=True)  # [N * k], by expert
        ends = torch.bincount(experts.flatten(), minlength=self.num_experts).cumsum(0).int()
        units = F.grouped_mm(rows[order // self.k], self.w_in, offs=ends).relu()
        results = F.grouped_mm(units, self.w_out, offs=ends) * logits.softmax(-1).flatten()[order, None]
        return torch.zeros_like(rows).index_add_(0, order // self.k, results).view_as(hidden)


def eight_lines(case: Case, as_linear: bool = False) -> Built:
    layer = EightLines(case.dim, case.hidden_dim, case.num_experts, case.k, as_linear)
    return layer, layer


def transformers(implementation: str) -> Callable[[Case], Built]:
    """The experts of transformers (NemotronH's, which have no gate projection) with its usual softmax router."""

    def build(case: Case) -> Built:
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

        config = SimpleNamespace(
            n_routed_experts=case.num_experts, hidden_size=case.dim, moe_intermediate_size=case.hidden_dim,
            moe_latent_size=None, mlp_hidden_act="relu", _experts_implementation=implementation,
        )  # fmt: skip
        experts = NemotronHExperts(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            experts.up_proj.normal_(0, case.dim**-0.5)
            experts.down_proj.normal_(0, case.hidden_dim**-0.5)
        return _with_router(case, experts, lambda hidden, weights, chosen: experts(hidden, chosen, weights))

    return build


def scattermoe(case: Case) -> Built:
    """ScatterMoE's experts (Tan et al. 2024) with the usual softmax router."""
    from scattermoe.mlp import MLP

    experts = MLP(case.dim, case.hidden_dim, case.num_experts, case.k, activation=nn.ReLU())
    return _with_router(case, experts, lambda hidden, weights, chosen: experts(hidden, weights, chosen))


def _with_router(case: Case, experts: nn.Module, apply: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Built:
    """Experts, a function of hidden states, weights and chosen experts, behind a softmax router."""
    gate = nn.Linear(case.dim, case.num_experts, False)

    def layer(hidden: Tensor) -> Tensor:
        weights, chosen = torch.topk(F.softmax(gate(hidden).float(), -1), case.k, dim=-1)
        return apply(hidden, (weights / weights.sum(-1, keepdim=True)).to(hidden.dtype), chosen)

    return layer, nn.ModuleList([experts, gate])


def _pairs_fit(case: Case) -> bool:
    """Whether batched_mm's copies of expert weights, one for every assignment, take at most 2 GiB."""
    return case.tokens * case.k * 2 * case.dim * case.hidden_dim * 4 < 2 << 30


IMPLEMENTATIONS: dict[str, Implementation] = {
    "pointsman": Implementation(pointsman),
    "eight lines": Implementation(eight_lines),
    "eight lines as nn.Linear": Implementation(partial(eight_lines, as_linear=True)),
    "transformers grouped_mm": Implementation(transformers("grouped_mm"), "transformers"),
    "transformers eager": Implementation(transformers("eager"), "transformers"),
    "transformers batched_mm": Implementation(transformers("batched_mm"), "transformers", _pairs_fit),
    "scattermoe": Implementation(scattermoe, "scattermoe", lambda case: case.device != "cpu"),
    LIMIT: Implementation(limit, suits=lambda case: case.train),
}
OWN = ("pointsman", LIMIT)
"""These are always measured; the others are peers."""
