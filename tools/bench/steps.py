"""Training steps of HyperRouter's small Transformer-XL: a stage of `benchmarks/gpu`."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from pointsman.ops.kernels import using
from pointsman_lab.data.corpus import open_corpus
from pointsman_lab.recipes import preset
from pointsman_lab.tasks.language_modelling.task import LanguageModelling
from pointsman_lab.training.kernels import check_kernels
from pointsman_lab.training.state import TrainingState

SETTINGS = {"preset": "small", "router": "hyperrouter", "data": "stdlib"}
"""HyperRouter's small model; its batches are 22 x 512 tokens after a memory of 512."""
FIRST, STEPS = 12, 10  # warm-up steps (memory, compilation), and steps of a measurement


class Steps:
    def __init__(self, device: str, settings: Mapping[str, Any]) -> None:
        config = preset(settings["preset"], **{key: value for key, value in settings.items() if key != "preset"})
        self.device = torch.device(device)
        task = LanguageModelling(open_corpus(config.data))
        self.state = TrainingState(task.prepared(config), task, self.device)
        check_kernels(config, self.device)
        self.kernels = config.kernels
        for _ in range(FIRST):
            self.step()

    def measure(self) -> dict[str, float]:
        """Mean seconds of a few consecutive steps, after one step of warm-up."""
        self.step()
        start = self._now()
        for _ in range(STEPS):
            self.step()
        return {"total": (self._now() - start) / STEPS}

    def step(self) -> None:
        with using(self.kernels):
            self.state.train_step()

    def launches(self) -> dict[str, float]:
        """How many kernels and copies one step starts on the device, and the share of its time in which none runs."""
        if self.device.type != "cuda":
            return {}
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            began = self._now()
            self.step()
            took = self._now() - began
        events = [event for event in found.events() or () if event.device_type.name == "CUDA"]
        busy = sum(event.time_range.elapsed_us() for event in events) / 1e6  # of one stream: they do not overlap
        return {"launches": len(events), "idle": max(0.0, 1 - busy / took)}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
