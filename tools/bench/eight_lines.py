"""`python -m tools.bench.eight_lines [CASE ...]`: MoE beside the layer that `F.grouped_mm` makes of eight lines.

Forward and backward on a CPU: processor time of one thread, the two in turn, medians; and the bytes that autograd keeps
for backward. Above 1 MoE is faster, or keeps less.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman import MoE

CASES = {  # tokens, dim, hidden, experts, k, turns
    "small": (1024, 128, 128, 8, 2, 31),
    "a": (11264, 256, 512, 16, 2, 5),
    "a-2048": (2048, 256, 512, 16, 2, 11),
    "b": (4096, 352, 352, 16, 2, 9),
    "c": (2048, 768, 3072, 32, 1, 3),
    "experts-128": (4096, 512, 192, 128, 8, 5),
    "decode-1": (1, 256, 512, 16, 2, 201),
    "decode-32": (32, 1024, 2048, 64, 8, 11),
}
"""Those that begin with "decode" have no backward."""


class EightLines(nn.Module):
    """Sort, two grouped products, weighted sum: what one writes without a library."""

    def __init__(self, dim: int, hidden: int, experts: int, k: int) -> None:
        super().__init__()
        self.router, self.k, self.num_experts = nn.Linear(dim, experts), k, experts
        self.w_in = nn.Parameter(torch.randn(experts, dim, hidden) * 0.06)
        self.w_out = nn.Parameter(torch.randn(experts, hidden, dim) * 0.06)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)  # [N, dim]
        logits, experts = self.router(rows).topk(self.k, -1)  # [N, k]
        order = experts.flatten().argsort(stable=True)  # [N * k], by expert
        ends = torch.bincount(experts.flatten(), minlength=self.num_experts).cumsum(0).int()
        units = F.grouped_mm(rows[order // self.k], self.w_in, offs=ends).relu()
        results = F.grouped_mm(units, self.w_out, offs=ends) * logits.softmax(-1).flatten()[order, None]
        return torch.zeros_like(rows).index_add_(0, order // self.k, results).view_as(hidden)


def kept_bytes(layer: nn.Module, hidden: Tensor) -> int:
    """What autograd keeps of a forward, each storage once, without parameters and the input."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), hidden)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(hidden)
    del output
    return sum(kept.values())


def main(names: Sequence[str]) -> int:
    torch.set_num_threads(1)
    for name in names or CASES:
        if name not in CASES:
            print(f"unknown case {name!r}: {', '.join(CASES)}", file=sys.stderr)
            return 2
        tokens, dim, width, experts, k, turns = CASES[name]
        torch.manual_seed(0)
        layers: tuple[nn.Module, nn.Module] = (
            MoE(dim, width, experts, top_k=k, bias=False),
            EightLines(dim, width, experts, k),
        )
        train = not name.startswith("decode")
        hidden = torch.randn(1, tokens, dim, requires_grad=train)

        def once(layer: nn.Module, hidden: Tensor = hidden, train: bool = train) -> float:
            started = time.process_time()
            with torch.set_grad_enabled(train):
                output = layer(hidden)
                if train:
                    output.square().mean().backward()
            return time.process_time() - started

        for layer in layers:
            layer.train(train)
            once(layer)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(turns):
            for layer, taken in zip(layers, times, strict=True):
                taken.append(once(layer))
        ours, theirs = map(statistics.median, times)
        line = f"{name:<12} {ours * 1e3:9.2f} ms, eight lines {theirs * 1e3:9.2f} ms: {theirs / ours:.2f}"
        if train:
            mine, its = (kept_bytes(layer, hidden) / 2**20 for layer in layers)
            line += f"; kept {mine:6.1f} MiB, eight lines {its:6.1f}"
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
