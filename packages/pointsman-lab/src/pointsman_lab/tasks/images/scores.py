"""Figures of robust image classification: corruption error, detection of outliers, calibration.

Sources: ImageNet-C (Hendrycks and Dietterich 2019), ImageNet-A and -O (Hendrycks et al. 2021, natural-adv-examples),
ImageNet-R (imagenet-r).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman._errors import needing

Numbers = NDArray[np.float64]
Errors = Mapping[str, Sequence[float]]
"""Corruption -> error (0 to 1) at each severity."""

ALEXNET: Mapping[str, float] = {
    "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640, "defocus_blur": 0.819880,
    "glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.798360, "snow": 0.866816, "frost": 0.826572,
    "fog": 0.819324, "brightness": 0.564592, "contrast": 0.853204, "elastic_transform": 0.646056,
    "pixelate": 0.717840, "jpeg_compression": 0.606500,
}  # fmt: skip
"""Mean error of AlexNet over the five severities of ImageNet-C."""
ALEXNET_CLEAN = 0.435
"""Its error on ImageNet's validation images (Hendrycks and Dietterich 2019, Table 1)."""


def corruption_error(errors: Errors, reference: Errors, clean: float = 0, reference_clean: float = 0) -> float | None:
    """mCE: the mean over corruptions of (sum of errors over severities) / (that of the reference).

    Args:
        reference: the errors of the reference model, or one mean error a corruption.
        clean, reference_clean: for relative mCE, which is of the rise of each error over these.

    Returns:
        None where the corruptions differ, or the reference has no error, or no rise, on one.
    """
    bases = {name: float(np.mean(of)) - reference_clean for name, of in reference.items()}
    if not errors or errors.keys() != bases.keys() or min(bases.values()) <= 0:
        return None
    return float(np.mean([(float(np.mean(own)) - clean) / bases[name] for name, own in errors.items()]))


def detection_library() -> Any:
    """The module `sklearn.metrics`; RunError if it is not installed."""
    with needing("detection of outliers needs scikit-learn", "vision"):
        from sklearn import metrics
    return metrics


def detection(scores: Numbers, positive: NDArray[np.bool_]) -> dict[str, float]:
    """{"aupr", "auroc", "fpr95"}: average precision, area under the ROC curve, false positives at 95 % recall.

    The last one is at the threshold whose recall is nearest to 95 %, of several the lowest, as the code of
    natural-adv-examples takes it.
    """
    metrics = detection_library()
    false, found, _ = metrics.roc_curve(positive, scores, drop_intermediate=False)
    whole = int(np.argmax(found == 1)) + 1
    nearest = whole - 1 - int(np.argmin(np.abs(found[:whole][::-1] - 0.95)))
    aupr, auroc = metrics.average_precision_score(positive, scores), metrics.roc_auc_score(positive, scores)
    return {"aupr": float(aupr), "auroc": float(auroc), "fpr95": float(false[nearest])}


def rms_calibration_error(confidence: Numbers, right: NDArray[np.bool_], size: int = 100) -> float:
    """sqrt(sum over bins b of n_b / n (accuracy_b - confidence_b)^2), bins of `size` images by rising confidence.

    The published loop leaves the last bin out; this one counts it.
    """
    order = np.argsort(confidence, kind="stable")
    edges = range(size, len(order), size)
    errors = [
        len(part) * (float(right[part].mean()) - float(confidence[part].mean())) ** 2 for part in np.split(order, edges)
    ]
    return float(np.sqrt(sum(errors) / len(order)))


def expected_calibration_error(confidence: Numbers, right: NDArray[np.bool_], bins: int = 15) -> float:
    """ECE: sum over bins of equal width of n_b / n |accuracy_b - confidence_b| (Guo et al. 2017)."""
    bin_of = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    error = 0.0
    for index in np.unique(bin_of):
        inside = bin_of == index
        error += inside.sum() * abs(float(right[inside].mean()) - float(confidence[inside].mean()))
    return error / len(confidence)


def response_rate_accuracy(confidence: Numbers, right: NDArray[np.bool_]) -> float:
    """AURRA: the mean over response rates n' / n of the accuracy on the n' most confident images."""
    order = np.argsort(-confidence, kind="stable")
    return float(np.mean(np.cumsum(right[order]) / np.arange(1, len(order) + 1)))


def calibration(confidence: Numbers, right: NDArray[np.bool_]) -> dict[str, float]:
    return {
        "rms": rms_calibration_error(confidence, right),
        "ece": expected_calibration_error(confidence, right),
        "aurra": response_rate_accuracy(confidence, right),
    }
