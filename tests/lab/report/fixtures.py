"""Well-formed run and comparison directories with invented figures: test data, never results."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SCALE = {"smoe": 1.0, "smoe-dropout": 1.2, "hyperrouter": 0.7, "frozen-scaled": 0.75, "thor": 1.4}
WORDS = "def route(self, token):\n    return self.experts[token.id] # naïve <b>&amp; x = 'é'\n"


def quality(router: str, top_k: int, seed: int) -> float:
    """An invented figure, the same on every machine."""
    return 1.5 + SCALE.get(router, 1.1) / top_k + 0.01 * seed + 0.003 * (seed % 2) * len(router)


def write_run(
    path: Path,
    router: str = "smoe",
    seed: int = 0,
    *,
    steps: int = 400,
    top_k: Sequence[int] = (1, 2, 4, 8),
    experts: int = 8,
    layers: int = 4,
    metric: str = "bits_per_character",
    done: bool = True,
    values: Mapping[int, float] | None = None,
    explorer: bool = False,
) -> Path:
    """Writes one run directory. `done=False`: training has stopped half way."""
    path.mkdir(parents=True)
    config = {
        "format": 1,
        "model": {"router": router, "num_experts": experts, "num_layers": layers, "dim": 64, "vocab_size": 205},
        "data": "stdlib",
        "preset": "tiny",
        "steps": steps,
        "seed": seed,
        "train_top_k": "N/2:N",
        "eval_top_k": list(top_k),
        "learning_rate": 1e-3,
        "clip_norm": 1.0,
    }
    dump(path / "config.json", config)
    environment = {"python": "3.11.2", "torch": "2.13.0", "device": "cpu", "threads": 2, "kernels": {"matmul": "blas"}}
    dump(path / "environment.json", environment)
    rng = np.random.default_rng(seed)
    names = [f"blocks.{layer}.moe" for layer in range(layers)]
    last = steps if done else steps // 2
    with (path / "metrics.jsonl").open("w") as lines:
        for step in range(1, last + 1):
            loss = 1.2 + 2.5 * math.exp(-step / (steps / 4)) + 0.08 * rng.standard_normal() + 0.1 * SCALE.get(router, 1)
            row: dict[str, Any] = {
                "kind": "train", "step": step, "loss": loss, "bits": loss / math.log(2), "top_k": 4 + 4 * step // steps,
                "learning_rate": 1e-3, "gradient_norm": 0.3, "tokens_per_second": 5e3, "step_seconds": 0.05,
                "overhead": 0.01,
            }  # fmt: skip
            lines.write(json.dumps(row) + "\n")
            if step % max(1, steps // 20) == 0:
                for layer, name in enumerate(names):
                    load = rng.dirichlet(np.full(experts, 2.0 + layer)).tolist()
                    entropy = 2.0 - SCALE.get(router, 1.0) * step / steps * 0.5 - 0.1 * layer
                    row = {"kind": "routing", "step": step, "layer": name, "entropy": entropy, "load": load,
                           "margin": 0.1, "dead": 0, "fluctuation": 0.4 * math.exp(-step / steps),
                           "collapse": 3 + layer + step / steps}  # fmt: skip
                    lines.write(json.dumps(row) + "\n")
                for k in top_k:
                    row = {"kind": "valid", "step": step, "top_k": k, "loss": loss + 1 / k, "metric": metric,
                           "value": (loss + 1 / k) / math.log(2)}  # fmt: skip
                    lines.write(json.dumps(row) + "\n")
        if not done:
            lines.write('{"kind": "train", "st')
    if done:
        results = [
            {
                "split": "test", "top_k": k, "nats": math.log(2) * value, "metric": metric, "tokens": 1000,
                "value": value,
                "routers": {
                    name: {"entropy": 2.0 - 0.1 * layer, "entropy_std": 0.2, "load": [1 / experts] * experts}
                    for layer, name in enumerate(() if router.startswith("dense") else names)
                },
            }
            for k in (values or top_k)
            for value in [values[k] if values else quality(router, k, seed)]
        ]  # fmt: skip
        evaluation = {
            "format": 1, "checkpoint": f"step-{steps}", "results": results, "router_parameters": 2080,
            "parameters": 100000, "step_seconds": 0.05 + 0.001 * seed,
            "protocol": {"split": "test", "tokens": 1000, "segment_length": 128, "memory_length": 384, "batch_size": 8,
                         "checkpoint": "last"},
        }  # fmt: skip
        dump(path / "evaluation.json", evaluation)
        if explorer and not router.startswith("dense"):
            write_explorer(path, router, seed, top_k=top_k, experts=experts, names=names, steps=steps)
    return path


def write_explorer(
    path: Path, router: str, seed: int, *, top_k: Sequence[int], experts: int, names: Sequence[str], steps: int
) -> None:
    """An explorer.json of invented routing, packed by the real packer."""
    import torch

    from pointsman.routing import Routing
    from pointsman_lab.evaluation.explorer import pack

    generator = torch.Generator().manual_seed(100 * seed + len(router))
    text = (WORDS * 12)[:900]
    codes = torch.tensor([ord(character) % 29 for character in text])
    seen = {}
    for k in top_k:
        seen[k] = {}
        for name in names:
            logits = torch.randn(29, experts, generator=generator)[codes] / SCALE.get(router, 1.0)
            logits = logits + 0.3 * torch.randn(len(text), experts, generator=generator)
            probs = logits.softmax(-1)
            weights, chosen = probs.topk(k, dim=-1)
            seen[k][name] = Routing(chosen, weights, probs, logits)
    inputs = {name: torch.randn(len(text), 4, generator=generator) for name in names}
    sample = pack(seen, list(text), inputs, top_k[1], 300)
    dump(path / "explorer.json", {**sample, "checkpoint": f"step-{steps}", "split": "test", "level": "byte"})


def write_comparison(
    path: Path,
    routers: Sequence[str] = ("smoe", "smoe-dropout", "hyperrouter"),
    seeds: Sequence[int] = (0, 1, 2),
    *,
    missing: Sequence[tuple[str, int]] = (),
    unfinished: Sequence[tuple[str, int]] = (),
    **options: Any,
) -> Path:
    """Writes a comparison directory; `missing` runs have not begun, `unfinished` ones have stopped half way."""
    path.mkdir(parents=True)
    steps = options.get("steps", 400)
    settings = {"data": "stdlib", "preset": "tiny", "steps": steps, "train_top_k": "N/2:N", "model": {}}
    dump(path / "comparison.json", {"format": 1, "settings": settings, "routers": list(routers), "seeds": list(seeds)})
    for position, router in enumerate(routers):
        for seed in seeds:
            if (router, seed) not in missing:
                done = (router, seed) not in unfinished
                write_run(path / "runs" / f"r{position}" / f"seed-{seed}", router, seed, done=done, **options)
    return path


def write_finetuning(run: Path, variant: str, router: str, seed: int, *, metric: float, scratch: bool = False) -> Path:
    """A fine-tuning of a run, with an invented accuracy."""
    path = write_run(
        run / "finetune" / variant / f"seed-{seed}", router, seed, steps=10, metric="accuracy",
        values={1: metric, 8: metric + 0.01},
    )  # fmt: skip
    record = json.loads((path / "evaluation.json").read_text())
    record["protocol"] = {
        "task": "sst2: invented", "split": "test", "length": 512, "truncated": {"train": 0, "test": 3},
        "pooling": "last", "trained_with_k": "N", "frozen": [], "balance": None, "from_scratch": scratch, "steps": 10,
    }  # fmt: skip
    if not scratch:
        record["change_from_pretrained"] = {"layers": {"blocks.0.moe": {"top1": 0.25, "sets": 0.5}}}
    dump(path / "evaluation.json", record)
    return path


def dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
