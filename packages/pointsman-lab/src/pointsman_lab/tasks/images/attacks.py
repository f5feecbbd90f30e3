"""White-box attacks on image classifiers: PGD and FGSM, with the overlap of chosen experts before and after.

As V-MoE's released adversarial project runs them: sign steps without a random start, on the classification loss alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.control import named_routers, set_top_k
from pointsman.delivery import without_losses
from pointsman.diagnostics.observe import evaluating
from pointsman.diagnostics.statistics import Fluctuation
from pointsman.recording import record_routing
from pointsman.routing import Routing
from pointsman_lab.progress import Progress, Stop, check_stop
from pointsman_lab.tasks.images.augment import evaluation_batches
from pointsman_lab.tasks.images.image_set import ImagePart
from pointsman_lab.tasks.images.task import image_nats
from pointsman_lab.tasks.images.vit import VisionTransformer


@dataclass(frozen=True)
class GradientAttack:
    """Steps of `size / steps` along the gradient's sign, never further than `size` from the image.

    Attributes:
        name: "pgd" or "fgsm".
        steps: 40 (PGD) or 1 (FGSM).
        size: largest change of a value in [-1, 1]: 1 / 127.5 is one grey level of 255.
    """

    name: str
    steps: int
    size: float = 1 / 127.5


ATTACKS = {"pgd": GradientAttack("pgd", 40), "fgsm": GradientAttack("fgsm", 1)}


def attacked(model: VisionTransformer, images: Tensor, labels: Tensor, attack: GradientAttack) -> Tensor:
    """images [B, 3, S, S] in [-1, 1] -> the same, changed so that the loss of `labels` [B] rises."""
    targets = F.one_hot(labels, model.config.num_classes).to(images.dtype)
    moved = images.clone()
    for _ in range(attack.steps):
        moved.requires_grad_(True)
        with torch.enable_grad():
            loss = image_nats(model(moved), targets, model.config.loss).sum()
            (slope,) = torch.autograd.grad(loss, moved)
        with torch.no_grad():
            moved = moved + attack.size / attack.steps * slope.sign()
            moved = torch.maximum(torch.minimum(moved, images + attack.size), images - attack.size).clamp_(-1, 1)
    return moved


@torch.no_grad()
def under_gradient_attack(
    model: VisionTransformer,
    part: ImagePart,
    attack: GradientAttack,
    *,
    top_k: int | None,
    batch_size: int,
    budget: int | None = None,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Accuracy on clean and attacked images, and how far the routing of each token moved.

    Attacks see the model at this k and the loss of the classes alone, without the routers' losses.

    Returns:
        {"attack", "steps", "size", "top_k", "images", "clean", "attacked", "layers": {layer: `Fluctuation` with
        "iou", the mean intersection over union of the experts chosen before and after}}.
    """
    layers = {name: Fluctuation() for name, _ in named_routers(model)}
    unions = {name: Overlap() for name in layers}
    count, before_right, after_right = 0, 0, 0
    total = len(part) if budget is None else min(budget, len(part))
    if progress:
        progress.phase(attack.name, -(-total // batch_size))
    device = next(model.parameters()).device
    with evaluating(model, 0), _only_images_train(model), set_top_k(model, top_k) if top_k else nullcontext():
        batches = evaluation_batches(part, batch_size, budget)
        for number, (clean, labels) in enumerate(batches, 1):
            check_stop(stop)
            clean, labels = clean.to(device), labels.to(device)
            hostile = attacked(model, clean, labels, attack)
            nothing: dict[str, Routing] = {}
            with record_routing(model) if layers else nullcontext(nothing) as one:
                before = model(clean)
            with record_routing(model) if layers else nullcontext(nothing) as two:
                after = model(hostile)
            for name in layers:
                layers[name].update(one[name], two[name])
                unions[name].update(one[name], two[name])
            count += len(labels)
            before_right += int((before.argmax(-1) == labels).sum())
            after_right += int((after.argmax(-1) == labels).sum())
            if progress:
                progress.advance(number, {})
    return {
        "attack": attack.name,
        "steps": attack.steps,
        "size": attack.size,
        "top_k": top_k or model.config.num_experts,
        "images": count,
        "clean": before_right / count,
        "attacked": after_right / count,
        "layers": {name: {**layers[name].result(), "iou": unions[name].result()} for name in layers},
    }


@contextmanager
def _only_images_train(model: VisionTransformer) -> Iterator[None]:
    """Inside, no parameter takes a gradient, and the routers' losses are left out."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with without_losses(model):
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


class Overlap:
    """The mean over tokens of |A & B| / |A | B|, of the experts that two routings chose."""

    def __init__(self) -> None:
        self.sum, self.tokens = 0.0, 0

    def update(self, one: Routing, other: Routing) -> None:
        """Adds two routings of the same tokens; tokens without an expert in both are not counted."""
        first, second = _members(one), _members(other)
        union = (first | second).sum(-1)
        shared = (first & second).sum(-1)
        self.sum += float((shared / union.clamp_min(1)).double().sum())
        self.tokens += int((union > 0).sum())

    def result(self) -> float | None:
        return self.sum / self.tokens if self.tokens else None


def _members(routing: Routing) -> Tensor:
    """[tokens, E] bool."""
    hot = torch.zeros(len(routing.probs), routing.num_experts, dtype=torch.bool, device=routing.probs.device)
    pairs = routing.pairs
    hot[pairs.token, pairs.expert] = True
    return hot
