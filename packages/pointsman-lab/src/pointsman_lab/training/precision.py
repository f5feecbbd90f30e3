"""The precision in which models compute."""

from __future__ import annotations

import torch

from pointsman_lab.training.config import RunConfig


def autocast(config: RunConfig, device: torch.device) -> torch.autocast:
    """A context in which models compute in bfloat16 where the settings ask for it; "auto": on CUDA."""
    wanted = config.precision == "bfloat16" or (config.precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)
