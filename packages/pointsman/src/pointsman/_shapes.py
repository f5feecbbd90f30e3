"""The shape of every JSON file of a run directory, for `_files.read_json`: what a reader may rely on."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, get_args

from pointsman._errors import RunError

MAYBE = float | None
ROUTERS = {"*": {"entropy": MAYBE, "entropy_std": MAYBE, "load": [MAYBE]}}
RESULT = {
    "split": str, "top_k!": int | None, "metric": str, "value": MAYBE, "nats": MAYBE, "tokens": int | None,
    "routers": ROUTERS, "attack": dict | None, "recipe": str, "unmarked": dict | None,
}  # fmt: skip
LAYERS = {"*": {"top1": MAYBE, "sets": MAYBE}}
EVALUATION = {
    "checkpoint": str, "protocol": dict, "results": [RESULT], "routing": [dict], "parameters": int | None,
    "router_parameters": int | None, "step_seconds": MAYBE, "change_from_pretrained": {"layers": LAYERS},
}  # fmt: skip
SHAPES: dict[str, Any] = {
    "config.json": {"model": dict, "seed": int, "steps": int | None, "preset": str | None, "data": str},
    "environment.json": {"packages": dict, "kernels": dict},
    "evaluation.json": EVALUATION,
    "evaluation-*.json": EVALUATION,
    "attacks-*.json": EVALUATION,
    "robust-*.json": {"kind!": str, "protocol!": {"top_k!": [int]}, "results!": [{"top_k!": int}], "routing": [dict]},
    "pictures.json": {"classes!": [str], "images!": list, "labels!": [int], "layers!": [str], "found!": {"*": [int]}},
    "comparison.json": {
        "settings!": {"model!": dict}, "routers!": [str], "seeds!": [int], "command": str, "kernels": dict, "data": str,
    },
    "finetune.json": {
        "task!": str, "classes!": [str], "fingerprint": str, "freeze!": [str], "balance!": MAYBE, "pooling!": str,
        "head_dropout!": float, "from_scratch!": bool, "pretrained": dict | None,
    },
    "diagnostics.json": {
        "protocol": dict, "layers": {"*": dict}, "routers": {"*": dict},
        "history": [{"checkpoint!": str, "layers!": {"*": dict}}],
    },
    "explorer.json": {
        "format": int, "tokens": [str], "top_k": [int], "num_experts": int, "layers": [str], "routing": str,
        "usage": dict, "level": str | None, "checkpoint": str | None,
        "map": {"indices": [int], "top_k": int, "layers": dict, "method": str},
        "history": {"top_k": int, "checkpoints": [{"step": int, "layers": {"*": dict}}]},
    },
    "exam.json": {"version!": int, "rows!": [str], "tasks!": [str], "seeds!": int, "imports": [str]},
    "exam-*.json": {
        "row!": str, "tried!": [[str | float | int | None]], "chosen": {"spec!": str, "rate!": float}, "refused": str,
        "runs!": {"*": {
            "value!": MAYBE, "curve!": [[MAYBE]], "ami": float, "used": int, "cost": float, "confusion": [[int]],
        }},
    },
    "audit.json": dict,
    "start.json": dict,
    "manifest.json": {"step": int, "files": {"*": {"bytes!": int, "sha256!": str}}, "aliases": {"*": {"*": str}}},
    "state.json": {"config": dict, "data": str, "vocabulary": str, "kernels": dict, "environment": dict},
}  # fmt: skip
"""File name, in which "*" stands for anything, -> shape."""


def shape_of(name: str) -> Any:
    """The shape of the file called so; None for one that has none."""
    return next((shape for pattern, shape in SHAPES.items() if fnmatchcase(name, pattern)), None)


def check_shape(value: Any, shape: Any, where: str) -> None:
    """RunError unless parsed JSON has this shape; keys that are missing, and those that the shape lacks, may be.

    Args:
        shape: a type, a union of them (`float` takes whole numbers, too), `[shape]` for a list of such, `{key: shape}`
            for an object, in which the key "*" stands for every other one, and one that ends in "!" must be there.
        where: names it: "FILE" or "FILE: key".
    """
    if isinstance(shape, list):
        _expect(isinstance(value, list), value, "a list", where)
        for index, one in enumerate(value):
            check_shape(one, shape[0], f"{where}[{index}]")
    elif isinstance(shape, dict):
        _expect(isinstance(value, dict), value, "an object", where)
        for key in (key.removesuffix("!") for key in shape if key.endswith("!")):
            _expect(key in value, value, f"an object with {key!r}", where)
        for key, one in value.items():
            if (inner := shape.get(key, shape.get(f"{key}!", shape.get("*")))) is not None:
                check_shape(one, inner, f"{where}: {key}" if ": " not in where else f"{where}.{key}")
    else:
        kinds = get_args(shape) or (shape,)
        right = any(
            isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
            for kind in kinds
        )
        _expect(right, value, " or ".join(_JSON[kind] for kind in kinds), where)


_JSON = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
_JSON |= {dict: "an object", list: "a list"}


def _expect(right: bool, value: Any, what: str, where: str) -> None:
    if not right:
        raise RunError(f"{where}: {what} is expected, not {str(value)[:30]!r}")
