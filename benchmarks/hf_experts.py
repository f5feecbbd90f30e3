"""experts_implementation="pointsman" against eager and grouped_mm: seconds of a Mixtral block's experts on this CPU.

    python benchmarks/hf_experts.py [--quick]

Fresh routing at every call, the three interleaved, the median of the repeats. Forward alone, and forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import pointsman.hf  # noqa: F401 - registers the implementation

SHAPES = {  # dim, hidden, experts, k, tokens
    "small": (256, 512, 8, 2, 512),
    "tall": (512, 1024, 16, 2, 1024),
    "many experts": (512, 256, 64, 8, 1024),
    "decode": (512, 1024, 16, 2, 1),
}
IMPLEMENTATIONS = ("eager", "grouped_mm", "pointsman")


def measure(shape: tuple[int, ...], repeats: int, backward: bool) -> dict[str, float]:
    dim, hidden, experts, k, tokens = shape
    config = MixtralConfig(
        hidden_size=dim,
        intermediate_size=hidden,
        num_local_experts=experts,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=32,
    )
    torch.manual_seed(0)
    module = MixtralForCausalLM(config).model.layers[0].mlp.experts
    seconds: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    for repeat in range(repeats + 2):
        inputs = torch.randn(tokens, dim, requires_grad=backward)
        weights, index = torch.softmax(torch.randn(tokens, experts), -1).topk(k, -1)
        gradient = torch.randn(tokens, dim)
        for name in IMPLEMENTATIONS:
            module.config._experts_implementation = name
            module.zero_grad()
            start = time.perf_counter()
            with torch.set_grad_enabled(backward):
                output = module(inputs, index, weights)
                if backward:
                    output.backward(gradient)
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help="fewer repeats")
    values = flags.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32\n")
    print("| shape (dim, hidden, E, k, tokens) | pass | eager ms | grouped_mm ms | pointsman ms | eager / pointsman |"
          " grouped_mm / pointsman |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        for backward in (False, True):
            found = measure(shape, 5 if values.quick else 25, backward)
            ours = found["pointsman"]
            cells = " | ".join(f"{found[one] * 1e3:.2f}" for one in IMPLEMENTATIONS)
            ratios = f"{found['eager'] / ours:.2f} | {found['grouped_mm'] / ours:.2f}"
            which = "forward + backward" if backward else "forward"
            print(f"| {name} {shape} | {which} | {cells} | {ratios} |")


if __name__ == "__main__":
    main()
