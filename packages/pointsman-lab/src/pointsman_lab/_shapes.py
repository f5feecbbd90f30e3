"""What a file of a run directory may hold: the shape and size of each, known before anything is allocated."""

import base64
import zlib
from fnmatch import fnmatchcase
from typing import Any, get_args

from pointsman._errors import RunError

MAYBE = float | None
ROUTERS = {"*": {"entropy": MAYBE, "entropy_std": MAYBE, "load": [MAYBE]}}
RESULT = {
    "split": str, "top_k!": int | None, "metric": str, "value": MAYBE, "nats": MAYBE, "tokens": int | None,
    "low": MAYBE, "high": MAYBE, "routers": ROUTERS, "attack": dict | None, "unmarked": dict | None,
    "languages": {"*": {"value": MAYBE, "floor": MAYBE, "floor_name": str, "error": MAYBE}},
    "error": MAYBE, "transfer": MAYBE, "gap": MAYBE, "nats_per_character": MAYBE,
}  # fmt: skip
BOUNDED = {"*": {"mean": MAYBE, "half": MAYBE, "difference": dict | None}}
PAIR = {"experts!": [int], "lift!": MAYBE, "tokens!": int}
LAYERS = {"*": {"top1": MAYBE, "sets": MAYBE}}
EVALUATION = {
    "checkpoint": str, "protocol": dict, "results": [RESULT], "routing": [dict], "parameters": int | None,
    "router_parameters": int | None, "cost": {"*": int}, "step_seconds": MAYBE,
    "change_from_pretrained": {"layers": LAYERS},
}  # fmt: skip
DIAGNOSED = {
    "*": {
        "num_experts!": int,
        "entropy": {"mean!": MAYBE, "std!": MAYBE, "*": MAYBE},
        "mixing": {"*": MAYBE},
        "margin": {"*": MAYBE},
        "outputs": {"cka_mean": MAYBE},
        "jacobian": {"norm_ratio": MAYBE},
        "load": {"tokens": float, "assignments": float, "dead!": [int], "cv": MAYBE, "effective": MAYBE},
        "collapse": {"value": MAYBE, "classes!": int},
        "specialisation": {"corrected": MAYBE},
        "group": {"corrected": MAYBE},
    }
}
DIAGNOSIS = {
    "protocol": {"tokens": int, "split": str, "top_k": int | None},
    "source": {"step": int},
    "layers": DIAGNOSED,
    "history": [{"checkpoint!": str, "layers!": {"*": {"collapse": {"value": MAYBE}, "fluctuation": {"top1": MAYBE}}}}],
    "consistency": {"*": {"without_diagonal": MAYBE}},
}
SHIFTED = {
    "top_k!": int, "corruption": str, "value": MAYBE, "calibration": {"*": MAYBE}, "layers": {"*": dict},
}  # fmt: skip
SHAPES: dict[str, Any] = {
    "config.json": {"model": dict, "seed": int, "steps": int | None, "preset": str | None, "data": str},
    "environment.json": {"packages": dict, "kernels": dict, "origin": {"*": str}},
    "evaluation.json": EVALUATION,
    "evaluation-*.json": EVALUATION,
    "attacks-*.json": {**EVALUATION, "routing": [{"attack!": dict, "layers!": LAYERS}]},
    "robust-*.json": {
        "kind!": str, "protocol!": {"top_k!": [int], "images": int}, "results!": [SHIFTED], "clean": [SHIFTED],
        "routing": [{"layers": {"*": dict}}], "base_rate": float, "asked": {"from": {"*": str}},
    },
    "comparison.json": {
        "settings!": {"model!": dict}, "routers!": [str], "seeds!": [int], "command": str, "data": str,
        "tuned": {"*": {"*": str}}, "nodes": {"*": [str]},
        "shown": {"names": {"*": str}, "baseline": str | None, "columns": [str]},
    },
    "finetune.json": {
        "task!": str, "classes!": [str], "fingerprint": str, "freeze!": [str], "balance!": MAYBE, "pooling!": str,
        "head_dropout!": float, "from_scratch!": bool, "pretrained": dict | None,
    },
    "diagnostics.json": {**DIAGNOSIS, "routers": {"*": DIAGNOSIS}},
    "explorer.json": {
        "format": int, "tokens": [str], "top_k": [int], "num_experts": int, "layers": [str], "routing": str,
        "usage": dict, "level": str | None, "checkpoint": str | None,
        "map": {"top_k": int, "method": str, "tokens": [str], "layers": dict, "first": {"*": [int | None]}},
    },
    "exam.json": {
        "version!": int, "rows!": [str], "tasks!": [str], "seeds!": int, "imports": [str], "origins": {"*": {"*": str}},
    },
    "exam-*.json": {
        "row!": str, "tried!": [[str | float | int | None]], "chosen": {"spec!": str, "rate!": float}, "refused": str,
        "runs!": {"*": {
            "value!": MAYBE, "curve": [[MAYBE]], "ami": float, "used": int, "cost": float, "confusion": [[int]],
        }},
    },
    "audit.json": {
        "top_k": int | None, "protocol": dict, "domains": {"*": int}, "against": dict | None,
        "coverage": [
            {"times!": int, "experts!": int, "reached!": int, "first_tokens": int | None, "tokens": int | None,
             "blocks": int | None, "at_least": int | None}
        ],
        "quality": [
            {"top_k!": int | None, "loss!": MAYBE, "half": MAYBE, "perplexity": MAYBE, "difference": dict | None,
             "domains": BOUNDED}
        ],
        "layers": {"*": {
            "load": {"share": [MAYBE], "dead": [int], "effective": MAYBE}, "num_experts": int, "collapse": dict,
            "entropy": dict, "margin": dict, "specialisation": dict, "bfloat16": dict, "fluctuation": dict,
            "domains": {"*": {"share": [MAYBE], "entropy": MAYBE, "margin": MAYBE}}, "co_activation": {"pairs": [PAIR]},
        }},
        "answers": [
            {"top_k!": int | None, "prompts!": int, "reached!": dict | None, "gained": dict | None,
             "tokens!": dict | None, "times": dict | None}
        ],
        "divergence": [{"domains!": [str], "mean!": float, "half!": MAYBE}],
        "specialists": [
            {"layer!": str, "expert!": int, "domain!": str, "share!": float, "half!": float, "tokens!": int}
        ],
        "prunings": [
            {"method!": str, "kept!": int, "experts!": int, "groups!": {"*": [[int]]}, "dropped!": {"*": [int]},
             "share!": float, "share_half!": MAYBE, "within!": bool | None, "random": dict | None,
             "serving!": {"memory!": {"bfloat16!": float}, "rows!": [{"bytes!": float}]}}
        ],
        "super_experts": [{"layer!": str, "expert!": int, "peak!": float, "mean!": MAYBE, "half!": MAYBE}],
        "typical": [{"layer!": str, "expert!": int, "tokens!": [{"text!": str, "count!": int, "lift!": float}]}],
        "across": [{"layers!": [str], "bits!": float, "pairs!": [PAIR]}],
        "schedules": [
            {"kind!": str, "ks!": {"*": int}, "mean_k!": float, "searched!": float, "share!": float,
             "share_half!": MAYBE, "kept!": bool | None, "serving": [{"bytes!": float}]}
        ],
        "serving": {
            "parameters": int, "experts": int, "memory": {"*": float},
            "rows": [
                {"top_k!": int, "batch!": int, "distinct!": float, "flops!": float, "bytes!": float,
                 "seconds!": {"*": float}}
            ],
        },
        "placement": {"*": {"*": float}}, "cache": {"size": int, "layers": {"*": {"*": float}}},
    },
    "manifest.json": {"step": int, "files": {"*": {"bytes!": int, "sha256!": str}}, "aliases": {"*": {"*": str}}},
    "state.json": {"config": {"model": dict}, "data": str, "vocabulary": str, "environment": dict},
}  # fmt: skip
"""File name, in which "*" stands for anything, -> shape."""
METRICS_ROW = {"kind!": str, "step!": int, "layer": str, "load": [MAYBE]}

PRODUCTS = {"comparison.json": ("routers", "seeds"), "exam.json": ("rows", "tasks")}
"""File name -> the lists whose every pair has a place in tables."""
MOST_PAIRS = 2**16
MOST_OTHERS = 2**26
MOST_BYTES = {"config.json": 2**20, "environment.json": 2**20, "comparison.json": 2**22}
"""The largest size of a file by its name; of all others it is `MOST_OTHERS`."""
MOST_LINE = 2**24
"""Bytes of a line of a file that is read by lines."""
MOST_GROWTH = 10
"""How many times as large as its file a file's content may become."""


def unpacked(text: str, size: int) -> bytes:
    """The `size` bytes that base64 of zlib holds; ValueError if it holds another number, of which no more are made."""
    if not 0 <= size <= MOST_OTHERS:
        raise ValueError(f"{size:,} bytes; at most {MOST_OTHERS:,} are unpacked")
    content = inflated(base64.b64decode(text), size)
    if len(content) != size:
        raise ValueError(f"it does not hold {size:,} bytes")
    return content


def inflated(packed: bytes, most: int = MOST_OTHERS) -> bytes:
    """What zlib packed, at most so many bytes; ValueError if it is more, of which no more are made, or cut."""
    try:
        stream = zlib.decompressobj()
        content = stream.decompress(packed, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(content) > most:
        raise ValueError(f"more than {most:,} bytes when unpacked")
    if not stream.eof:
        raise ValueError("it is cut")
    return content


def is_shaped(value: Any, shape: Any) -> bool:
    """Whether `check_shape` finds nothing."""
    try:
        check_shape(value, shape, "")
    except RunError:
        return False
    return True


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
