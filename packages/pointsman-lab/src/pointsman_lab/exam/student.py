"""What is trained on a task: one layer, with the rows that every table has beside the routers."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from pointsman import MoE, Routing, RoutingContext, build_router, set_top_k
from pointsman.experts.modules import Experts
from pointsman.routers.frame.registry import parse_spec
from pointsman_lab.exam.sequences import Attention
from pointsman_lab.exam.task import Batch, Task

ROWS = {
    "oracle": "the same experts, initial weights and data, routed by the true answer",
    "plain": "one expert of the same active size: score 0",
    "dense": "one layer with the parameters of all experts",
}


class Student(nn.Module):
    """below -> layer -> above."""

    def __init__(self, task: Task, row: str, seed: int) -> None:
        super().__init__()
        self.row = row
        self.causal = task.causal
        torch.manual_seed(seed)
        self.below, self.above = task.below(), task.above()
        self.layer: nn.Module
        if row in ("plain", "dense"):
            inner = task.hidden * (task.top_k if row == "plain" else task.experts)
            self.layer = nn.Sequential(nn.Linear(task.dim, inner), nn.ReLU(), nn.Linear(inner, task.dim))
            return
        experts = Experts(task.dim, task.hidden, task.experts)
        if row == "oracle":
            self.layer = experts
            return
        sizes = {"dim": task.dim, "num_experts": task.experts, "vocab_size": task.vocabulary}
        k = task.top_k  # routers whose k is a cap start at E
        router = build_router(row, top_k=k, **sizes)  # type: ignore[arg-type]
        said = parse_spec(row)
        # renormalised over one expert the weight is 1, and the router would learn nothing
        if k == 1 and router.select.renormalize and "renormalize" not in (*said.options, *said.choice_options):
            torch.manual_seed(seed + 1)
            router = build_router(row, top_k=k, renormalize=False, **sizes)  # type: ignore[arg-type]
        if task.causal and not router.causal:
            raise ValueError(f"{row}: the router looks at later tokens")
        if "attention" in router.needs and not isinstance(self.below, Attention):
            raise ValueError(f"{row}: the router needs an attention trace")
        if getattr(router.score, "needs_counts", False):
            router.score.calibrate([1] * task.vocabulary)  # type: ignore[operator]
        self.layer = MoE(task.dim, task.hidden, task.experts, top_k=k, router=router)
        self.layer.experts.load_state_dict(experts.state_dict())

    def forward(self, batch: Batch, top_k: int | None = None) -> tuple[Tensor, Routing | None]:
        """The output [B, T, D] on a batch, and the routing; `top_k`: another k than in training."""
        hidden = batch.inputs if self.below is None else self.below(batch.inputs)
        routing = None
        if isinstance(self.layer, MoE):
            trace = self.below.trace if isinstance(self.below, Attention) else None
            context = RoutingContext(causal=self.causal, token_ids=batch.ids, attention=trace)
            with nullcontext() if top_k is None else set_top_k(self.layer, top_k):
                output, routing = self.layer(hidden, context, return_routing=True)
        elif isinstance(self.layer, Experts):
            routing = true_routing(batch, top_k, self.layer.num_experts)
            output = self.layer(hidden.flatten(0, 1), routing).view(hidden.shape)
        else:
            output = self.layer(hidden)
        return (output if self.above is None else self.above(output)), routing


def true_routing(batch: Batch, top_k: int | None, num_experts: int) -> Routing:
    """The true experts with their weights; of `top_k` at most, the heaviest."""
    experts, shares = (tensor.flatten(0, 1)[:, :top_k].contiguous() for tensor in (batch.experts, batch.shares))
    none = shares.new_zeros(len(shares), num_experts)
    return Routing(experts, shares, none, none)
