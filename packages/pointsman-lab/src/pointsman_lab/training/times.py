"""Clocks of the training loop."""

from __future__ import annotations

import statistics
import time


class Clock:
    """Adds up the time inside its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


class Times:
    """Times of the steps since the last line of metrics; entered around each turn of the loop."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._work = self._before = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._before += time.perf_counter() - self._began

    def step(self, seconds: float, work: float) -> None:
        """A step took so long, of which forward, backward and optimizer `work`."""
        self.steps.append(seconds)
        self._work += work

    def take(self) -> tuple[float, float]:
        """Median seconds a step, and the share of the loop's time outside forward, backward and optimizer."""
        now = time.perf_counter()
        whole = self._before + now - self._began
        median, overhead = statistics.median(self.steps), 1 - self._work / whole
        self.steps, self._work, self._before, self._began = [], 0.0, 0.0, now
        return median, overhead
