"""Machines and training runs as published, and the search for one by name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.planning.shapes import Shape


@dataclass(frozen=True)
class Machine:
    """One GPU and its links. Bytes and operations a second, bytes.

    Attributes:
        title: for the page.
        flops: dense bf16.
        memory_speed, memory: of the GPU's own memory.
        fast_link: to GPUs of the same domain (NVLink), one direction.
        slow_link: between domains, a GPU.
        domain: GPUs that the fast link connects.
    """

    title: str
    flops: float
    memory_speed: float
    memory: float
    fast_link: float
    slow_link: float
    domain: int


@dataclass(frozen=True)
class PublishedRun:
    """A training run whose speed was published.

    Attributes:
        model, machine: names in `published.toml`. source: who published it.
        gpus, length: of the run; `length` is tokens a sequence.
        sequences: of a micro-batch on a GPU.
        micro_batches: of a step on a GPU.
        experts: ranks that experts are divided over.
        speed: tokens a second and GPU.
        teraflops: model TFLOP/s a GPU, where printed.
        pipeline, virtual: stages, and parts of a stage.
        assumed: what the source does not say.
    """

    model: str
    machine: str
    source: str
    gpus: int
    length: int
    sequences: int
    micro_batches: int
    experts: int
    speed: float
    teraflops: float | None = None
    pipeline: int = 1
    virtual: int = 1
    assumed: str = ""

    @property
    def bubble(self) -> float:
        """Time of a pipelined step over its work: 1 + (stages - 1) / (virtual stages * micro-batches)."""
        return 1 + (self.pipeline - 1) / (self.virtual * self.micro_batches)


@cache
def _data() -> dict[str, Any]:
    text = resources.files("pointsman_lab.planning").joinpath("published.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def machines() -> Mapping[str, Machine]:
    """Every machine with at least one published run."""
    evidence = {run["machine"] for run in _data()["runs"]}
    return {name: Machine(**values) for name, values in _data()["machines"].items() if name in evidence}


def machine(name: str) -> Machine:
    """The machine of this name.

    Raises:
        RunError: no published run on such a machine is known, so that a plan would be a guess.
    """
    known = machines()
    if name not in known:
        raise RunError(f"machine {name!r}: no published run to calibrate a plan with; {did_you_mean(name, known)}")
    return known[name]


def shapes() -> Mapping[str, Shape]:
    """The published models."""
    return {name: Shape.published(name, values) for name, values in _data()["models"].items()}


def published_billions() -> Mapping[str, float]:
    """Parameters in billions as the models' makers state them, where they do."""
    return {name: values["billions"] for name, values in _data()["models"].items() if "billions" in values}


def runs() -> list[PublishedRun]:
    """The published training runs."""
    return [PublishedRun(**values) for values in _data()["runs"]]
