"""White-box attacks on image classifiers: PGD and FGSM, with the overlap of chosen experts before and after.

As V-MoE's released adversarial project runs them: sign steps without a random start, on the classification loss alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.control import named_routers, set_top_k
from pointsman.delivery import without_losses
from pointsman.diagnostics.base import Moments
from pointsman.diagnostics.observe import evaluating
from pointsman.diagnostics.statistics import Fluctuation
from pointsman.ops.selection import members
from pointsman.recording import record_routing
from pointsman.routing import Routing
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext
from pointsman_lab.progress import check_stop
from pointsman_lab.tasks.images.augment import evaluation_batches
from pointsman_lab.tasks.images.part import ImagePart
from pointsman_lab.tasks.images.shifts import Frame
from pointsman_lab.tasks.images.task import image_nats
from pointsman_lab.tasks.images.vit import VisionTransformer

ATTACKS = {"pgd": 40, "fgsm": 1}
"""Steps of `SIZE / steps` along the gradient's sign, never further than `SIZE` from the image."""
SIZE = 1 / 127.5
"""Largest change of a value in [-1, 1]: one grey level of 255."""


def attacked(
    model: VisionTransformer, images: Tensor, labels: Tensor, steps: int, how: EvaluationContext = PLAIN
) -> Tensor:
    """images [B, 3, S, S] in [-1, 1] -> the same, changed so that the loss of `labels` [B] rises."""
    targets = F.one_hot(labels, model.config.num_classes).to(images.dtype)
    moved = images.clone()
    for _ in range(steps):
        moved.requires_grad_(True)
        with torch.enable_grad():
            with how.precision:
                logits = model(moved)
            loss = image_nats(logits.to(images.dtype), targets, model.config.loss).sum()
            (slope,) = torch.autograd.grad(loss, moved)
        with torch.no_grad():
            moved = moved + SIZE / steps * slope.sign()
            moved = torch.maximum(torch.minimum(moved, images + SIZE), images - SIZE).clamp_(-1, 1)
    return moved


@torch.no_grad()
def under_gradient_attack(
    model: VisionTransformer, part: ImagePart, name: str, *, top_k: int | None, frame: Frame
) -> dict[str, Any]:
    """Accuracy on clean and attacked images, and how far the routing of each token moved; `name`: of `ATTACKS`.

    Attacks see the model at this k and the loss of the classes alone, without the routers' losses.

    Returns:
        {"attack", "steps", "size", "top_k", "images", "clean", "attacked", "layers": {layer: `Fluctuation` with
        "iou", the mean intersection over union of the experts chosen before and after}}.
    """
    layers = {layer: Fluctuation() for layer, _ in named_routers(model)}
    unions = {layer: Moments() for layer in layers}
    count, before_right, after_right = 0, 0, 0
    how = frame.how
    how.progress.phase(name, -(-len(part) // frame.batch_size))
    device = next(model.parameters()).device

    def routed(images: Tensor) -> tuple[Tensor, dict[str, Routing]]:
        watch = record_routing(model) if layers else nullcontext(dict[str, Routing]())
        with evaluating(model, 0), watch as records, how.precision:  # a router that draws draws the same twice
            return model(images), records

    with evaluating(model, 0), _only_images_train(model), set_top_k(model, top_k) if top_k else nullcontext():
        for number, (clean, labels) in enumerate(evaluation_batches(part, frame.batch_size), 1):
            check_stop(how.stop)
            clean, labels = clean.to(device), labels.to(device)
            hostile = attacked(model, clean, labels, ATTACKS[name], how)
            (before, one), (after, two) = routed(clean), routed(hostile)
            for layer, change in layers.items():
                change.update(one[layer], two[layer])
                first, second = (members(each[layer].experts, each[layer].num_experts) for each in (one, two))
                union = (first | second).sum(-1)  # 0: a token without an expert in both does not count
                unions[layer].add((first & second).sum(-1) / union.clamp_min(1), union > 0)
            count += len(labels)
            before_right += int((before.argmax(-1) == labels).sum())
            after_right += int((after.argmax(-1) == labels).sum())
            how.progress.advance(number, {})
    return {
        "attack": name,
        "steps": ATTACKS[name],
        "size": SIZE,
        "top_k": top_k or model.config.num_experts,
        "images": count,
        "clean": before_right / count,
        "attacked": after_right / count,
        "layers": {layer: {**change.result(), "iou": unions[layer].mean} for layer, change in layers.items()},
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
