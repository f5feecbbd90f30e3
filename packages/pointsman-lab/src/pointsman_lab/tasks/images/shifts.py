"""How an image classifier takes shifted images: corruptions, other renditions, outliers, hard images.

Shapes: N images, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman._errors import RunError
from pointsman.control import set_top_k
from pointsman.diagnostics.observe import evaluating
from pointsman.diagnostics.statistics import Fluctuation
from pointsman.recording import record_routing
from pointsman.routing import Routing
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext, eval_top_k, map_routing
from pointsman_lab.progress import check_stop
from pointsman_lab.tasks.images.augment import evaluation_batches
from pointsman_lab.tasks.images.part import ImagePart
from pointsman_lab.tasks.images.scores import calibration, detection, detection_library
from pointsman_lab.tasks.images.severities import PARAMETERS, SEVERITIES
from pointsman_lab.tasks.images.task import HEADER, predictions
from pointsman_lab.tasks.images.vit import VisionTransformer

Corrupted = Callable[[str, int], ImagePart]
"""(corruption, severity) -> the clean images, corrupted."""


@dataclass(frozen=True)
class Frame:
    """How images are read, `batch_size` side by side, at every k of `top_k`.

    Attributes:
        keep: filled with "SET-kK.csv" -> the predictions of a set of images; None: they are not kept.
    """

    batch_size: int
    top_k: Sequence[int]
    how: EvaluationContext = PLAIN
    keep: dict[str, str] | None = None

    def take(self, name: str, k: int | None, seen: Seen) -> None:
        if self.keep is not None:
            end = f"-k{k}" if k else ""
            self.keep[f"{name}{end}.csv"] = HEADER + predictions(seen.logits, seen.labels)


@dataclass(frozen=True)
class Seen:
    """What a classifier made of images.

    Attributes:
        logits: [N, C]. labels: [N].
        routings: layer -> one routing a batch; empty unless asked for.
    """

    logits: Tensor
    labels: Tensor
    routings: Mapping[str, list[Routing]] = field(default_factory=dict)

    def restricted(self, classes: Sequence[int]) -> Seen:
        """The same with the logits of other classes at -inf."""
        kept = torch.full((self.logits.shape[1],), -torch.inf, dtype=self.logits.dtype)
        kept[list(classes)] = 0
        return replace(self, logits=self.logits + kept)

    @property
    def right(self) -> NDArray[np.bool_]:
        """[N], whether the class was found."""
        found: NDArray[np.bool_] = (self.logits.argmax(-1) == self.labels).numpy()
        return found

    @property
    def accuracy(self) -> float:
        return float(self.right.mean())

    @property
    def confidence(self) -> NDArray[np.float64]:
        """[N], the largest probability."""
        most: NDArray[np.float64] = torch.softmax(self.logits, -1).amax(-1).numpy()
        return most


@torch.no_grad()
def look(model: VisionTransformer, part: ImagePart, k: int | None, frame: Frame, *, routing: bool = False) -> Seen:
    """Classifies all images at this k (None: the model has no routers)."""
    if not len(part):
        raise RunError("there are no images to classify")
    device = next(model.parameters()).device
    logits, labels = [], []
    routings: dict[str, list[Routing]] = {}

    def take(name: str, found: Routing, context: object) -> None:
        routings.setdefault(name, []).append(map_routing(found, Tensor.cpu))

    watch = record_routing(model, take) if routing and k else nullcontext()
    with evaluating(model, 0), set_top_k(model, k) if k else nullcontext(), watch:
        for images, own in evaluation_batches(part, frame.batch_size):
            check_stop(frame.how.stop)
            with frame.how.precision:
                logits.append(model(images.to(device)).double().cpu())
            labels.append(own)
    return Seen(torch.cat(logits), torch.cat(labels), routings)


def fluctuation(one: Seen, two: Seen) -> dict[str, Any]:
    """Routing fluctuation of each layer between two pictures of the same things: layer -> {"top1", "sets", …}."""
    found = {}
    for name, before in one.routings.items():
        change = Fluctuation()
        for first, second in zip(before, two.routings[name], strict=True):
            change.update(first, second)
        found[name] = {key: value for key, value in change.result().items() if key != "by_expert"}
    return found


def under_corruptions(
    model: VisionTransformer, clean: ImagePart, corrupted: Corrupted, *, routing_k: int, frame: Frame
) -> dict[str, Any]:
    """Accuracy on clean and corrupted images at every k, and routing fluctuation between them at `routing_k`.

    Returns:
        {"clean": [{"top_k", "value", "calibration"}], "results": [{"corruption", "severity", "top_k", "value"}],
        "routing": [{"corruption", "severity", "top_k", "layers"}]}; no fluctuation where the labels of the corrupted
        images are in another order.
    """
    values = eval_top_k(model, frame.top_k)
    routing_k = min(routing_k, model.config.num_experts)
    every = dict.fromkeys(values if None in values else (*values, routing_k))
    before = {k: look(model, clean, k, frame, routing=k == routing_k) for k in every}
    results, routing = [], []
    for k in values:
        frame.take("clean", k, before[k])
    frame.how.progress.phase("corruptions", len(PARAMETERS) * len(SEVERITIES))
    for number, (name, severity) in enumerate(product(PARAMETERS, SEVERITIES)):
        part = corrupted(name, severity)
        where = {"corruption": name, "severity": severity}
        aligned = np.array_equal(part.labels, clean.labels)
        for k in before:
            if k not in values and not aligned:
                continue
            after = look(model, part, k, frame, routing=k == routing_k and aligned)
            if k in values:
                frame.take(f"{name}-{severity}", k, after)
                results.append({**where, **_k(model, k), "value": after.accuracy})
            if k == routing_k and aligned:
                routing.append({**where, **_k(model, k), "layers": fluctuation(before[k], after)})
        frame.how.progress.advance(number + 1, {})
    plain = [
        {**_k(model, k), "value": before[k].accuracy, "calibration": calibration(before[k].confidence, before[k].right)}
        for k in values
    ]
    return {"clean": plain, "results": results, "routing": routing}


def _k(model: VisionTransformer, k: int | None) -> dict[str, int]:
    return {"top_k": k or model.config.num_experts}


def on_renditions(
    model: VisionTransformer, clean: ImagePart, part: ImagePart, classes: Sequence[int], frame: Frame
) -> dict[str, Any]:
    """Accuracy on other pictures of some classes (ImageNet-A, -R), with logits restricted to these classes.

    Args:
        classes: those of the whole folder, of which `part` may be some images.

    Returns:
        {"classes", "images", "results": [{"top_k", "value", "clean", "gap", "calibration"}]}: `clean` is the accuracy
        on the clean images of the same classes, restricted to them, too.
    """
    inside = np.flatnonzero(np.isin(clean.labels, classes))
    if not len(inside):
        raise RunError("the clean part has no images of these classes")
    same = clean.take(inside)
    results = []
    for k in eval_top_k(model, frame.top_k):
        seen, plain = (look(model, one, k, frame).restricted(classes) for one in (part, same))
        frame.take("shifted", k, seen)
        frame.take("clean", k, plain)
        results.append({
            **_k(model, k), "value": seen.accuracy, "clean": plain.accuracy, "gap": plain.accuracy - seen.accuracy,
            "calibration": calibration(seen.confidence, seen.right),
        })  # fmt: skip
    return {"classes": len(classes), "images": len(part), "clean_images": len(same), "results": results}


def on_outliers(
    model: VisionTransformer, inliers: ImagePart, outliers: ImagePart, classes: Sequence[int] | None, frame: Frame
) -> dict[str, Any]:
    """How well the largest probability tells outliers from images of known classes (ImageNet-O).

    The score of an image is minus its largest probability, among `classes` if given; outliers are the positives.

    Returns:
        {"inliers", "outliers", "base_rate", "results": [{"top_k", "aupr", "auroc", "fpr95"}]}: an AUPR of the base rate
        is chance.
    """
    detection_library()  # before the images are looked at, which takes a while
    results = []
    positive = np.arange(len(inliers) + len(outliers)) >= len(inliers)
    for k in eval_top_k(model, frame.top_k):
        scores = []
        for name, part in (("inliers", inliers), ("outliers", outliers)):
            seen = look(model, part, k, frame)
            seen = seen if classes is None else seen.restricted(classes)
            frame.take(name, k, seen)
            scores.append(-seen.confidence)
        results.append({**_k(model, k), **detection(np.concatenate(scores), positive)})
    base = len(outliers) / len(positive)
    return {"inliers": len(inliers), "outliers": len(outliers), "base_rate": base, "results": results}


def on_hard_images(
    model: VisionTransformer, part: ImagePart, reference: VisionTransformer, *, reference_k: int, frame: Frame
) -> dict[str, Any]:
    """Accuracy on the images that another model gets wrong, as ImageNet-A was filtered.

    The reference's accuracy on them is 0 by construction; a model with independent mistakes of the same rate would have
    its accuracy on all images (`clean`), and one with the same mistakes 0.

    Returns:
        {"images", "of", "reference_k", "results": [{"top_k", "value", "clean", "gap"}]}.
    """
    k = eval_top_k(reference, (reference_k,))[0]
    wrong = np.flatnonzero(~look(reference, part, k, frame).right)
    if not len(wrong):
        raise RunError("the reference model gets no image wrong: there are no hard ones")
    known, results = _k(reference, k)["top_k"], []
    for k in eval_top_k(model, frame.top_k):
        seen = look(model, part, k, frame)
        frame.take("hard", k, Seen(seen.logits[wrong], seen.labels[wrong]))
        hard, every = float(seen.right[wrong].mean()), seen.accuracy
        results.append({**_k(model, k), "value": hard, "clean": every, "gap": every - hard})
    return {"images": len(wrong), "of": len(part), "reference_k": known, "results": results}
