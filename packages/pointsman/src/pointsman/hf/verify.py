"""verify: whether two models are the same: their tensors, their routing, their logits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.diagnostics.observe import evaluating
from pointsman.hf.loading import load_model
from pointsman.recording import record_routing

MOST = 3  # names in a message


@torch.no_grad()
def verify(
    a: nn.Module | str | Path, b: nn.Module | str | Path, ids: Tensor | None = None, tolerance: float = 1e-5
) -> None:
    """Raises ValueError unless two models have the same tensors, routing and logits: after a conversion, or a resume.

        hf.verify(model, "checkpoint-500")

    Tensors of the same name are compared bit for bit, in the dtype of the smaller one. Names that only one model has
    are an error, unless no name is common: then two classes hold the same weights in different layouts, and routing and
    logits decide. Routing: the chosen experts of every layer, in the order of the layers. Logits: the largest
    difference over the largest value.

    Args:
        a, b: models of transformers, or folders (names) from which they are loaded.
        ids: token ids [B, T] to run; None: 64 random ones of the smaller vocabulary.
        tolerance: of the logits, relative.

    Raises:
        ValueError: all that differs, one line each.
    """
    first, second = (one if isinstance(one, nn.Module) else load_model(str(one)) for one in (a, b))
    if any(tensor.is_meta for one in (first, second) for tensor in one.parameters()):
        raise ValueError("verify: a model's weights are offloaded, to the disk or another device: load it whole")
    found = [*_tensors(first, second)]
    if foreign := [type(one).__name__ for one in (first, second) if not hasattr(one, "get_input_embeddings")]:
        raise ValueError(f"verify: {foreign[0]} is no model of transformers")
    if ids is None:
        size = min(int(one.get_input_embeddings().weight.shape[0]) for one in (first, second))  # type: ignore[operator]
        ids = torch.randint(size, (2, 32), generator=torch.Generator().manual_seed(0))
    (routings, logits), (others, other) = (_run(one, ids) for one in (first, second))
    found += _routing(list(routings.items()), list(others.items()))
    if logits.shape != other.shape:
        found.append(f"logits: {list(logits.shape)} and {list(other.shape)}")
    else:
        difference = float((logits - other.to(logits.device)).abs().max() / logits.abs().max().clamp_min(1e-30))
        if not difference <= tolerance:
            found.append(f"logits: they differ by {difference:.1e} of the largest")
    if found:
        raise ValueError("\n".join(["verify: the models differ", *(f"  {line}" for line in found)]))


def _run(model: nn.Module, ids: Tensor) -> tuple[dict[str, Any], Tensor]:
    inputs: dict[str, Any] = {"input_ids": ids.to(next(model.parameters()).device)}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with evaluating(model, 0), record_routing(model) as records:
        output = model(**inputs, use_cache=False)
    logits = output.logits if "logits" in output else output[0]
    return records, logits.double()


def _tensors(first: nn.Module, second: nn.Module) -> list[str]:
    one, two = first.state_dict(), second.state_dict()
    common = one.keys() & two.keys()
    if not common:
        return []
    found = []
    for name in (name for name in one if name in common):
        mine, its = one[name], two[name].to(one[name].device)
        dtype = min(mine.dtype, its.dtype, key=lambda dtype: dtype.itemsize)
        if mine.shape != its.shape:
            found.append(f"{name}: {list(mine.shape)} and {list(its.shape)}")
        elif not torch.equal(mine.to(dtype), its.to(dtype)):
            largest = float((mine.double() - its.double()).abs().max())
            found.append(f"{name}: its values differ by up to {largest:.1e}")
    lines = found[:MOST] + ([f"… {len(found)} tensors differ"] if len(found) > MOST else [])
    for label, names in (("the first", one.keys() - two.keys()), ("the second", two.keys() - one.keys())):
        if names:
            more = ", …" if len(names) > MOST else ""
            lines.append(f"only {label} has {len(names)} tensors: {', '.join(sorted(names)[:MOST])}{more}")
    return lines


def _routing(first: list[tuple[str, Any]], second: list[tuple[str, Any]]) -> list[str]:
    if len(first) != len(second):
        return [f"routing: {len(first)} and {len(second)} layers"]
    found = []
    for (name, one), (_, two) in zip(first, second, strict=True):
        mine, its = (routing.chosen.cpu().sort(-1).values for routing in (one, two))
        if mine.shape != its.shape or one.num_experts != two.num_experts:
            shapes = (f"{routing.chosen.shape[-1]} of {routing.num_experts} experts" for routing in (one, two))
            found.append(f"{name}: routing: {' and '.join(shapes)}")
        elif not torch.equal(mine, its):
            found.append(f"{name}: routing: {int((mine != its).any(-1).sum())} of {len(mine)} tokens go elsewhere")
    return found[:MOST] + ([f"… routing differs in {len(found)} layers"] if len(found) > MOST else [])
