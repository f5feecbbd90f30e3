"""The vision transformer against timm's of the same shape, and what each router costs on top: images a second.

    python -m tools.bench.vit [--seconds 40] [--out benchmarks/results/vit.md]

`tiny-vit` (32 x 32 pixels, patches of 4 x 4, mean pooling, batches of 64) in float32 on one thread. timm's
VisionTransformer gets the same width, depth, heads, inner width and pooling as router `plain` with inner width 256
everywhere. All take turns on the same new images, in rounds until `--seconds` have passed, at least 5; ratios are
medians of the ratios round by round. A training step is forward, backward and AdamW.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman_lab.models import build_model, preset_config
from tools.bench.report import machine

BATCH, LEAST, WARM_UP = 64, 5, 2
ROUTERS = ("smoe", "vmoe", "xmoe", "hyperrouter", "vmoe+similarity", "vmoe+attention:heads=lowest-entropy-sequence")
SAME = "plain, inner width 256"
PEER = "timm's VisionTransformer"


def timm_model() -> nn.Module | None:
    """timm's of the shape of `SAME`; None without timm."""
    try:
        from timm.models.vision_transformer import VisionTransformer
    except ImportError:
        return None
    return VisionTransformer(  # type: ignore[no-any-return]
        img_size=32, patch_size=4, num_classes=10, embed_dim=128, depth=4, num_heads=4, mlp_ratio=2,
        global_pool="avg", class_token=False, fc_norm=False,
    )  # fmt: skip


def models() -> dict[str, nn.Module]:
    """Name -> model, in the order of the table."""
    plain = preset_config("tiny-vit", 0, router="plain")
    found: dict[str, nn.Module] = {SAME: build_model(replace(plain, expert_hidden_dim=256))}
    if (peer := timm_model()) is not None:
        found[PEER] = peer
    found["plain"] = build_model(plain)
    return found | {router: build_model(replace(plain, router=router)) for router in ROUTERS}


def step(model: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """A training step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def run(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return run


def forward(model: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """Inference."""
    model.eval()

    @torch.inference_mode()
    def run(images: Tensor, labels: Tensor) -> None:
        model(images)

    return run


def measure(make: Callable[[nn.Module], Callable[[Tensor, Tensor], None]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each round."""
    torch.manual_seed(0)
    runs = {name: make(model) for name, model in models().items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin, rounds = time.monotonic(), 0
    while rounds < WARM_UP + LEAST or time.monotonic() - begin < seconds:
        images, labels = torch.rand(BATCH, 3, 32, 32) * 2 - 1, torch.randint(10, (BATCH,))
        for name, run in runs.items():
            start = time.perf_counter()
            run(images, labels)
            if rounds >= WARM_UP:
                times[name].append(time.perf_counter() - start)
        rounds += 1
    return times


def table(times: dict[str, list[float]], what: str) -> list[str]:
    """Images a second and the ratio to the plain model of the same width and to timm's."""
    lines = [f"## {what}", "", "| model | images/s | time / plain | time / timm |", "|---|---:|---:|---:|"]
    for name, own in times.items():
        base = times[SAME if name in (SAME, PEER) else "plain"]
        cells = [name, f"{BATCH / statistics.median(own):,.0f}", ratio(own, base)]
        lines.append("| " + " | ".join([*cells, ratio(own, times[PEER]) if PEER in times else "-"]) + " |")
    return [*lines, "", f"{len(next(iter(times.values())))} rounds.", ""]


def ratio(one: list[float], other: list[float]) -> str:
    """The median of the ratios round by round."""
    return f"{statistics.median(a / b for a, b in zip(one, other, strict=True)):.2f}"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--seconds", type=float, default=40.0, help="for training, and half of it for inference")
    flags.add_argument("--out", type=Path, default=Path("benchmarks/results/vit.md"))
    values = flags.parse_args()
    torch.set_num_threads(1)
    lines = ["# Vision transformers: timm, plain, and each router", ""]
    lines += [f"- {name}: {value}" for name, value in machine().items()]
    lines += ["", "`python -m tools.bench.vit`; routers have 8 experts of 128, k = 2; `plain` has one of 128.", ""]
    lines += table(measure(step, values.seconds), "Training step, batch 64")
    lines += table(measure(forward, values.seconds / 2), "Inference, batch 64")
    values.out.parent.mkdir(parents=True, exist_ok=True)
    values.out.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
