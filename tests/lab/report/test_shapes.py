"""Whatever the shape of a file allows, the page shows; it reads nothing whose type the shape does not say."""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from pointsman_lab._files import parse_json
from pointsman_lab._shapes import SHAPES, check_shape
from pointsman_lab.report import inside
from pointsman_lab.report.audits import _parts

ANY: list[Any] = [None, True, -1, 1.5, float("inf"), "x", "1", [], {}, [1, "x"], {"a": {"b": 1}}]
VALUES: dict[Any, list[Any]] = {
    int: [0, 1, 3, 7, -1], float: [0, 0.5, -2.5, 1e308, float("inf"), float("nan")], str: ["", "x", "a.b", "step-3"],
    bool: [True, False], type(None): [None], dict: [{}, {"a": 1}],
}  # fmt: skip
NAMES = ("a", "b", "layers.0")


class Known(dict[str, Any]):
    """An object of a file that refuses the keys of which its shape does not know."""

    shape: dict[str, Any]

    def get(self, key: Any, default: Any = None) -> Any:
        assert not self.shape or {key, f"{key}!", "*"} & self.shape.keys(), f"{key!r} is read and has no shape"
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        assert key in self, f"{key!r} is read and need not be there"
        return super().__getitem__(key)


def drawn(shape: Any, random: Random) -> Any:
    """A value of this shape; what a plain `dict` holds may be anything."""
    if isinstance(shape, list):
        return [drawn(shape[0], random) for _ in range(random.choice([0, 1, 2]))]
    if isinstance(shape, dict):
        found = Known()
        found.shape = shape
        for key, inner in shape.items():
            for name in NAMES if key == "*" else [key.removesuffix("!")]:
                if key.endswith("!") or random.random() < 0.7:
                    found[name] = drawn(inner, random)
        return found
    kind = random.choice(get_args(shape) or [shape])
    if kind is dict:
        return {name: random.choice(ANY) for name in ("mean", "half", "top1", "value", "within")}
    return random.choice(VALUES[kind])


def test_audits() -> None:
    for seed in range(300):
        audit = drawn(SHAPES["audit.json"], Random(seed))
        check_shape(audit, SHAPES["audit.json"], "audit.json")
        _parts(audit)


def test_diagnoses(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(300):
        random = Random(seed)
        found, own = (drawn(SHAPES["diagnostics.json"], random) for _ in range(2))
        monkeypatch.setattr(inside, "read_object", lambda file, found=found: found)
        runs = [SimpleNamespace(diagnostics=own)] if seed % 2 else []
        comparison: Any = SimpleNamespace(
            routers=["a", "c"], of=lambda router, runs=runs: runs, planned=True, path=Path()
        )
        inside.diagnosis_grid(comparison)
        for router in comparison.routers:
            inside.history_of(inside.diagnosis_of(comparison, router))


def test_a_whole_number_beyond_every_float_is_no_whole_number() -> None:
    assert parse_json(f"[{1 - 10**18}, {10**18 - 1}]") == [1 - 10**18, 10**18 - 1]
    assert parse_json("[-123456789012345678, 1234567890123456789]")[0] == -123456789012345678
    assert parse_json(f"[{10**400}, {-(10**19)}]") == [float("inf"), -1e19]
