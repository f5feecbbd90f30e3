"""Projection to two dimensions: UMAP with X-MoE's settings, or PCA where umap-learn is not installed."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from pointsman._errors import RunError

FEWEST = 20


def embed(points: NDArray[np.float64], method: str = "auto") -> tuple[NDArray[np.float64], str]:
    """[n, dim] -> ([n, 2], the method used).

    UMAP takes 100 neighbours and a least distance of 1 (X-MoE, Figure 2), with a fixed seed. "auto": UMAP where
    umap-learn is installed, PCA otherwise, and for fewer than 20 points.
    """
    if available(method) == "pca" or len(points) < FEWEST:
        return pca(points), "pca"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # umap warns that a fixed seed means one thread
        from umap import UMAP

        # initialized by PCA: the spectral initialization is slow where the neighbour graph is not connected
        reducer = UMAP(n_neighbors=min(100, len(points) - 1), min_dist=1.0, random_state=0, init="pca")
        found = reducer.fit_transform(points)
    return np.asarray(found, dtype=np.float64), "umap"


def available(method: str) -> str:
    """The method that is used here, "umap" or "pca"; RunError for an unknown one, or for UMAP without umap-learn."""
    if method not in ("auto", "umap", "pca"):
        raise RunError(f"map method {method!r}: allowed are auto, umap and pca")
    installed = find_spec("umap") is not None
    if method == "umap" and not installed:
        raise RunError("UMAP needs umap-learn: pip install 'pointsman[report]'")
    return "umap" if installed and method != "pca" else "pca"


def pca(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first two principal components [n, 2]; each with its largest entry positive, so that the sign is fixed."""
    centred = points - points.mean(0)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    found = np.zeros((len(points), 2))
    width = min(2, left.shape[1])
    found[:, :width] = left[:, :width] * singular[:width]
    signs = np.sign(found[np.abs(found).argmax(0), range(2)])
    return found * np.where(signs == 0, 1.0, signs)
