"""Makes pictures.json: test images with the expert of each patch, and the patches that each expert weighs most."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman._errors import RunError
from pointsman._files import write_whole
from pointsman.control import named_routers
from pointsman.diagnostics.base import first_choice, join_routings
from pointsman.ops.kernels import using
from pointsman.routing import Routing
from pointsman_lab.evaluation.passes import EvaluationContext
from pointsman_lab.runs.paths import PICTURES
from pointsman_lab.tasks.images.image_set import ImagePart
from pointsman_lab.tasks.images.layouts import Pixels
from pointsman_lab.tasks.images.sections import FORMAT
from pointsman_lab.tasks.images.shifts import Frame, look
from pointsman_lab.tasks.images.sources import chosen_rows, rows_of
from pointsman_lab.tasks.images.task import open_images
from pointsman_lab.training.run import load_run

SHOWN, SAMPLED, BEST = 24, 512, 12  # images on the page, images read, patches an expert
SIDE = 96  # of the images on the page at most
NONE = 0xFFFF


def collect_pictures(path: Path, *, device: str = "cpu") -> Path | None:
    """Reads evenly spaced test images at every k and writes pictures.json beside the run.

    Returns:
        The file; None for a model without routers.

    Raises:
        RunError: no run on images, no whole checkpoint, or data that are not there.
    """
    run = load_run(path, device=device)
    config = run.config
    if config.model.reads_tokens:
        raise RunError(f"{path} learned text, which has no patches")
    if not any(True for _ in named_routers(run.model)):
        return None
    images = open_images(config.data)
    whole = images.split(config.eval_split)
    part = rows_of(whole, chosen_rows(whole, SAMPLED))
    shown = chosen_rows(part, SHOWN)
    frame = Frame(config.eval_batch_size, EvaluationContext(run.autocast()))
    trained = config.top_k_schedule.high
    top_k = sorted({*config.eval_top_k, trained})
    tokens, grid = run.model.config.tokens, run.model.config.grid
    first: list[list[Any]] = []
    found: dict[str, list[int]] = {}
    best: dict[str, dict[str, Any]] = {}
    with using(run.kernels):
        for k in top_k:
            seen = look(run.model, part, k, frame, routing=True)
            routings = {name: join_routings(parts) for name, parts in seen.routings.items()}
            by_patch = [_patches(first_choice(one).numpy(), tokens, grid)[shown] for one in routings.values()]
            first.append([np.where(one < 0, NONE, one).astype("<u2") for one in by_patch])
            found[str(k)] = seen.logits.argmax(-1)[shown].tolist()
            if k == trained:
                best = {name: _most_routed(one, part, tokens, grid) for name, one in routings.items()}
                layers = list(routings)
    record = {
        "format": FORMAT,
        "checkpoint": f"step-{run.step}",
        "split": config.eval_split,
        "images": [_png(_smaller(part.images[row])) for row in shown],
        "labels": [int(part.labels[row]) for row in shown],
        "classes": list(images.classes),
        "found": found,
        "grid": grid,
        "top_k": top_k,
        "trained_k": trained,
        "num_experts": config.model.num_experts,
        "layers": layers,
        "first": base64.b64encode(np.array(first).astype("<u2").tobytes()).decode(),
        "best": best,
        "sampled": len(part),
    }
    return write_whole(path / PICTURES, json.dumps(record, allow_nan=False, separators=(",", ":")))


def _patches(values: NDArray[Any], tokens: int, grid: int) -> NDArray[Any]:
    """[N T] -> [N, G^2]: without the class token."""
    return values.reshape(-1, tokens)[:, tokens - grid * grid :]


def _most_routed(routing: Routing, part: ImagePart, tokens: int, grid: int) -> dict[str, Any]:
    """The patches with the largest weight of each expert, one an image, each with the patches around it.

    Returns:
        {"png": a sheet of windows, a row an expert, best first; "counts": how many stand in each row}.
    """
    pairs = routing.pairs
    weights = np.zeros((len(routing.probs), routing.num_experts))
    weights[pairs.token.numpy(), pairs.expert.numpy()] = pairs.weight.double().numpy()
    weights = weights.reshape(-1, tokens, routing.num_experts)[:, tokens - grid * grid :]
    size = part.images.shape[1] // grid
    side = 3 * size
    sheet = np.full((routing.num_experts * side, BEST * side, 3), 128, dtype=np.uint8)
    counts = []
    for expert in range(routing.num_experts):
        of_image = weights[:, :, expert].max(1)
        order = [row for row in np.argsort(-of_image, kind="stable")[:BEST] if of_image[row] > 0]
        counts.append(len(order))
        for column, row in enumerate(order):
            place = int(weights[row, :, expert].argmax())
            padded = np.pad(part.images[row], ((size, size), (size, size), (0, 0)), constant_values=128)
            top, left = place // grid * size, place % grid * size
            window = padded[top : top + side, left : left + side]
            sheet[expert * side : (expert + 1) * side, column * side : (column + 1) * side] = window
    return {"png": _png(sheet), "counts": counts, "side": side}


def _smaller(pixels: Pixels) -> Pixels:
    from PIL import Image

    if pixels.shape[0] <= SIDE:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def _png(pixels: Pixels) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
