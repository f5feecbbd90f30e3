"""explorer.json: the routing of a stretch of the evaluated split, for the page's maps and explorer."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import named_routers, set_top_k
from pointsman.diagnostics.observe import evaluating
from pointsman.ops.kernels import using
from pointsman.recording import observe_routing
from pointsman.routers.frame.registry import has_one_k
from pointsman.routing import Routing, RoutingContext
from pointsman_lab._files import temporary_folder, write_whole
from pointsman_lab.data.vocabulary import END_OF_LINE
from pointsman_lab.evaluation.explorer import pack
from pointsman_lab.evaluation.passes import join_routings, map_routing
from pointsman_lab.models.memory import Memory
from pointsman_lab.registry import OLDEST, family
from pointsman_lab.report.inside import readable
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.paths import CHECKPOINTS, EXPLORER
from pointsman_lab.training.run import load_run

Note = Callable[[str], None]
Seen = dict[str, tuple[Tensor, Routing]]
"""Layer name -> the inputs [T, dim] of its router, and its routing of all T tokens."""


def collect_samples(path: Path, *, tokens: int = 2048, points: int = 500, out: Path | None = None) -> Path | None:
    """Runs a stretch of the evaluated split through a finished run and writes `explorer.json`.

    Args:
        tokens: length of the stretch, the first of the split; shorter if the split is.
        points: how many of them the 2-D map shows.
        out: the folder for the file; by default the run's.

    Returns:
        The file; None for a model without routers.
    """
    run = load_run(path)
    if not any(True for _ in named_routers(run.model)):
        return None
    config = run.config
    task = run.task()
    segments, memory = task.stretch(config, tokens), config.eval_memory_length
    top_k = sorted(config.eval_top_k)
    middle = top_k[len(top_k) // 2]
    with using(run.config.kernels):
        seen = {k: look(run.model, segments, k, memory) for k in top_k}
    routings = {k: {name: routing for name, (_, routing) in layers.items()} for k, layers in seen.items()}
    words = display_tokens(np.concatenate(segments), run.vocabulary)
    sample = pack(routings, words, inputs_of(run.model, seen[middle]), middle, points)
    sample |= {"checkpoint": f"step-{run.step}", "split": task.reported_split(config), "level": run.vocabulary.level}
    return write_whole((out or path) / EXPLORER, json.dumps(sample, allow_nan=False, separators=(",", ":")))


def collect_all(comparison: Comparison, *, note: Note | None = None, keep: bool = True) -> Comparison:
    """Samples of the first finished run of every router, where they are missing or out of date.

    A run that cannot be sampled (no checkpoint, no data) is skipped; `note` is told why.

    Args:
        keep: writes them into the runs' folders; else into a temporary one.
    """
    runs = dict(comparison.runs)
    for router in comparison.routers:
        run = next((run for run in comparison.of(router) if run.done), None)
        if run is None or has_one_k(router):
            continue
        found = run.explorer
        if run.is_audit or (found and not (run.path / CHECKPOINTS).is_dir()):  # cannot be made anew
            if note and found and not readable(found):
                note(f"no sample of {router}: its explorer.json is damaged, or of an older version")
            continue
        wanted = {
            "checkpoint": run.evaluation.get("checkpoint"), "split": run.evaluation["results"][0].get("split"),
            "top_k": sorted(run.config.get("eval_top_k") or ()),
        }  # fmt: skip
        current = readable(found) and wanted.items() <= found.items()
        if current or not family(run.family or OLDEST).reads_tokens:
            continue
        try:
            if not (run.path / CHECKPOINTS).is_dir():
                raise RunError("its weights are not here")
            if note:
                note(f"sampling the routing of {router}")
            aside = None if keep else temporary_folder()
            collect_samples(run.path, out=aside)
            runs[router, run.seed] = replace(run, aside=aside)
        except ValueError as error:  # a RunError, or a router that is not known here
            if note:
                note(f"no sample of {router}: {error}")
    return replace(comparison, runs=runs)


@torch.no_grad()
def look(model: Any, segments: Sequence[NDArray[np.int64]], top_k: int, memory_length: int) -> Seen:
    """One pass over the segments, each [t] ids, with memory where the model has one, in evaluation mode at this k.

    Of an encoder-decoder the encoder alone runs.
    """
    device = next(model.parameters()).device
    side = getattr(model, "encoder", model)
    memory_length = memory_length if side.config.causal else 0
    routings: dict[str, list[Routing]] = {}
    hiddens: dict[str, list[Tensor]] = {}

    def take(name: str, routing: Routing, context: RoutingContext | None, hidden: Tensor) -> None:
        routings.setdefault(name, []).append(map_routing(routing, Tensor.cpu))
        hiddens.setdefault(name, []).append(hidden.float().cpu())

    memory: Memory | None = None
    with evaluating(model, 0), set_top_k(model, top_k), observe_routing(model, take):
        for ids in segments:
            segment = torch.from_numpy(ids[None]).to(device)
            _, memory = side.encode(segment, memory, memory_length=memory_length)
    return {name: (torch.cat(hiddens[name]), join_routings(parts)) for name, parts in routings.items()}


def display_tokens(ids: NDArray[np.int64], vocabulary: Any) -> list[str]:
    """Each token as text. A character of several bytes stands at its first byte, the others are '·'."""
    if vocabulary.level == "subword":
        return [vocabulary.decode([index]) for index in ids]
    symbols = [vocabulary.symbols[int(index)] for index in ids]
    if vocabulary.level == "piece":
        return [str(symbol).replace("▁", " ") for symbol in symbols]
    if vocabulary.level != "byte":
        return ["\n" if symbol == END_OF_LINE else str(symbol) for symbol in symbols]
    shown: list[str] = []
    for character in bytes(map(int, symbols)).decode(errors="surrogateescape"):
        if "\udc80" <= character <= "\udcff":  # a byte that is no UTF-8
            shown.append("�")
        else:
            shown += [character, *["·"] * (len(character.encode()) - 1)]
    return shown


@torch.no_grad()
def inputs_of(model: nn.Module, seen: Seen) -> dict[str, Tensor]:
    """Layer name -> the inputs of its router [T, dim], or their projection where the scorer has one (X-MoE)."""
    found = {}
    for name, router in named_routers(model):
        if name in seen:
            projection = getattr(router.score, "projection", None)
            found[name] = projection.cpu()(seen[name][0]) if isinstance(projection, nn.Module) else seen[name][0]
    return found
