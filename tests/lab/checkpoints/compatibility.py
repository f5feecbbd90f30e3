"""Which MoE classes of the installed transformers work with what: docs/huggingface-compatibility.md.

python tests/lab/checkpoints/compatibility.py --write
"""

import copy
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import transformers
from torch import Tensor

import pointsman
from pointsman import hf
from pointsman_lab.checkpoints import audit
from tests.library.hf import zoo
from tests.library.hf.test_replace import spread
from tests.library.hf.zoo import texts, tokenizer

PAGE = Path(__file__).parents[3] / "docs" / "huggingface-compatibility.md"
FEATURES = ("audit", "router", "set_top_k", "replace_routers", "mixers", "materialize", "experts", "upcycle to")
IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
UPCYCLED = {"mixtral": "llama, mistral", "qwen2_moe": "qwen2", "qwen3_moe": "qwen3"}


@dataclass
class Row:
    """One class: feature -> "" where it works, else the reason; and the specs that `audit` names."""

    name: str
    kind: str
    results: dict[str, str]
    crashed: list[str]
    routers: list[str] = field(default_factory=list)


def outcome(attempt: Callable[[], None]) -> tuple[str, bool]:
    """ "" if it works; the message of a refusal; and whether it failed in any other way."""
    try:
        attempt()
    except ValueError as refusal:
        return str(refusal).splitlines()[0], False
    except AssertionError as wrong:
        return f"differs: {str(wrong).splitlines()[0] if str(wrong) else wrong!r}", True
    except Exception as error:  # what must not happen
        return f"{type(error).__name__}: {error}".splitlines()[0], True
    return "", False


def output_of(model: Any) -> Tensor:
    inputs = {"input_ids": IDS}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS
    with torch.no_grad():
        output = model(**inputs, use_cache=False)
    return output.logits if "logits" in output else output[0]


def close(given: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    difference = float((given - expected).abs().max() / expected.abs().max())
    assert difference < tolerance, f"relative difference {difference:.1e}"


def examine(kind: str) -> Row:
    """Tries every feature on a tiny random model of one model type."""
    model = spread(zoo.tiny_model(kind))
    row = Row(type(model).__name__, kind, {}, [])

    def note(feature: str, attempt: Callable[[], None]) -> None:
        row.results[feature], crashed = outcome(attempt)
        if crashed:
            row.crashed.append(feature)

    try:
        expected = output_of(model)
    except TypeError as error:
        reason = f"{type(model).__name__} reads no tokens ({str(error).split('.')[-1]})"
        row.results = dict.fromkeys(FEATURES, reason)
        return row

    def audited() -> None:
        result = audit(model, tokenizer(), texts(1), length=12)
        assert result.layers
        row.routers = list(dict.fromkeys(layer["router"] for layer in result.layers.values() if layer["router"]))
        row.results["router"] = next(
            (str(layer["without"]) for layer in result.layers.values() if layer["without"]), ""
        )
        if any("no loss" in line for line in result.notes):
            row.results["audit note"] = "routing only; this class has no language-model head"
        for line in result.notes:
            if "experts 0 and 1 alone" in line:
                row.results["audit note"] = line

    def served() -> None:
        width = 1 if kind != "longcat_flash" else 3  # its own experts fail at k = 1
        with pointsman.set_top_k(model, width):
            assert not torch.allclose(output_of(model), expected, atol=1e-7), f"k = {width} changes nothing"
        close(output_of(model), expected)

    def replaced(spec: str) -> Any:
        changed = hf.replace_routers(copy.deepcopy(model), spec)
        close(output_of(changed), expected)
        return changed

    def own() -> None:
        if not row.routers:
            raise ValueError(row.results["audit"] or without)
        replaced("|".join(row.routers))

    def mixed() -> None:
        changed = replaced("hyperrouter+similarity")
        with torch.no_grad():
            for _, router in pointsman.control.named_routers(changed):
                router.mix.strength.value.fill_(0.7)
        assert not torch.allclose(output_of(changed), expected, atol=1e-7), "mixing changes nothing"

    def saved() -> None:
        changed = replaced("hyperrouter")
        with TemporaryDirectory() as folder:
            changed.save_pretrained(folder)
            loaded, report = type(changed).from_pretrained(folder, output_loading_info=True)
        assert not {*report["missing_keys"], *report["unexpected_keys"]}, "a checkpoint loses routers"
        close(output_of(loaded), expected)

    def materialized() -> None:
        changed = replaced("hyperrouter")
        with torch.no_grad():
            for _, router in pointsman.control.named_routers(changed):
                router.score.embedding.mul_(1.5)
        trained = output_of(changed)
        close(output_of(hf.materialize(changed)), trained, 1e-6)

    def computed() -> None:
        if not type(model)._can_set_experts_implementation():
            raise ValueError("the class does not use transformers' experts interface")
        model.set_experts_implementation("eager")
        eager = output_of(model)
        model.set_experts_implementation("pointsman")
        close(output_of(model), eager)

    note("audit", audited)
    without = row.results.pop("router", "")  # of all layers, or of some
    note("router", own)
    row.results["router"] = row.results["router"] or without
    note("set_top_k", served)
    note("replace_routers", saved)
    note("mixers", mixed)
    note("materialize", materialized)
    note("experts", computed)
    return row


def examine_all() -> list[Row]:
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in zoo.moe_modules():
            rows.append(examine(kind))
    return rows


def page(rows: list[Row]) -> str:
    """The table, and below it every reason once."""
    reasons: list[str] = []

    def cell(row: Row, feature: str) -> str:
        if feature == "upcycle to":
            return UPCYCLED.get(row.kind, "")
        reason = row.results[feature]
        named = ", ".join(f"`{spec}`" for spec in row.routers) if feature == "router" else ""
        if not reason:
            if named:
                return named
            extra = row.results.get("audit note", "") if feature == "audit" else ""
            if not extra:
                return "yes"
            reason, mark = extra, "yes"
        else:
            mark = named or "no"
        reason = tidy(reason)
        if reason not in reasons:
            reasons.append(reason)
        return f"{mark} [{reasons.index(reason) + 1}]"

    lines = [
        "# Which Hugging Face classes work with what",
        "",
        f"Generated with transformers {transformers.__version__} by `python tests/lab/checkpoints/compatibility.py "
        "--write`.",
        "For every model type with experts a tiny random model was built, and each feature tried on it:",
        "",
        "- *audit*: `audit`; *set_top_k*: another k",
        "- *router*: the spec that `audit` names (for the tiny model: two groups of experts, if the class has groups);",
        "  `replace_routers` with this spec gave the same output",
        "- *replace_routers*: `hyperrouter`, first forward equal to the original, also when saved and loaded",
        "- *mixers*: `hyperrouter+similarity`",
        "- *materialize*: back to the class's own gate with the same logits",
        '- *experts*: `experts_implementation="pointsman"` against eager',
        "- *upcycle to*: the dense classes that become this one",
        "",
        f"{sum(not row.results['audit'] for row in rows)} of {len(rows)} can be audited, "
        f"{sum(bool(row.routers) for row in rows)} have a router of this library, "
        f"{sum(not row.results['replace_routers'] for row in rows)} take another one.",
        "",
        "| class | model type | " + " | ".join(FEATURES) + " |",
        "|---" * (len(FEATURES) + 2) + "|",
    ]
    for row in rows:
        cells = " | ".join(cell(row, feature) for feature in FEATURES)
        lines.append(f"| {row.name} | `{row.kind}` | {cells} |")
    lines.append("")
    for index, reason in enumerate(reasons, 1):
        lines += [textwrap.fill(f"{index}. {reason}", 120, subsequent_indent="   ", break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def tidy(reason: str) -> str:
    """A reason without the layer's name, so that equal ones are one."""
    reason = re.sub(r"^(audit|set_top_k|replace_routers|materialize): ", "", reason)
    reason = re.sub(r"^nothing to see in \w+: ", "", reason)
    reason = re.sub(r"^no gate of \w+ can be observed: ", "", reason)
    reason = re.sub(r"^(\w+) has no gate next to", r"\1: no gate next to", reason)
    reason = re.sub(r"^layer '[^']*':? ?", "", reason)
    return re.sub(r"^[\w.]+\.\w+: ", "", reason)


if __name__ == "__main__":
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    found = examine_all()
    for one in found:
        print(f"{one.kind:25} " + "  ".join(f"{f}:{'ok' if not one.results.get(f) else 'no'}" for f in FEATURES[:-1]))
        for feature in one.crashed:
            print(f"    {feature}: {one.results[feature]}")
    if "--write" in sys.argv:
        PAGE.write_text(page(found), encoding="utf-8")
        print(f"written: {PAGE.name}")
