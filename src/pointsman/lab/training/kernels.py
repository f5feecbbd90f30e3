"""Which kernels a run uses, so that a resumed run and all runs of a comparison use the same."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pointsman._errors import RunError
from pointsman.lab.training.config import RunConfig
from pointsman.ops.kernels import PLAIN, Kernels, measure_kernels


def choose_kernels(config: RunConfig, recorded: Mapping[str, Any] | None, given: Kernels | None) -> Kernels:
    """The kernels of a run: those its checkpoint recorded, the plain ones if it is to be deterministic, those given to
    it, or the faster ones by a timing.

    Raises:
        RunError: this machine cannot use the recorded ones.
    """
    if recorded is not None:
        try:
            return Kernels.from_dict(recorded)
        except (TypeError, ValueError) as error:
            raise RunError(f"the checkpoint's kernels cannot be used here: {error}") from None
    if config.deterministic:
        return PLAIN
    return given or measure_kernels()


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """PyTorch's deterministic algorithms inside, if wanted; the setting is as before afterwards.

    With them cuBLAS refuses to work unless this variable says how much room it has, before its first product.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        if torch.cuda.is_available():
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
