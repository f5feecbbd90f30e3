"""Some tokens of an audit's text, for the report's explorer: their routing at every k, and a map of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pointsman.routing import Routing
from pointsman_lab.checkpoints.text import TextBatch
from pointsman_lab.evaluation.explorer import pack
from pointsman_lab.evaluation.passes import join_routings, map_routing

POINTS = 200
"""Tokens in the 2-D map."""


class Sample:
    """The first real tokens of each domain, `left` of the one that is read now, and their routing at every k."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.left = tokenizer, 0
        self.tokens: list[str] = []
        self.routings: dict[int, dict[str, list[Routing]]] = {}
        self.hidden: dict[str, list[Tensor]] = {}

    def begin(self, batch: TextBatch) -> Tensor | None:
        """[B*T] bool, the tokens of this batch to keep; None if the sample is full."""
        if self.left <= 0:
            return None
        places = torch.nonzero(batch.mask.reshape(-1))[: self.left, 0]
        self.left -= len(places)
        self.tokens += [self.tokenizer.decode([one]) for one in batch.ids.reshape(-1)[places].tolist()]
        return torch.zeros(batch.ids.numel(), dtype=torch.bool).index_fill_(0, places, True)

    def add(self, own: bool, layer: str, routing: Routing, hidden: Tensor, kept: Tensor) -> None:
        """Keeps the routing of the tokens `kept`; at the model's own k also the gate's input."""
        kept = kept.to(hidden.device)
        k = routing.experts.shape[-1]
        of_layer = self.routings.setdefault(k, {}).setdefault(layer, [])
        of_layer.append(map_routing(routing, lambda tensor: tensor[kept].cpu()))
        if own:
            self.hidden.setdefault(layer, []).append(hidden[kept].half().cpu())


def explorer(
    sample: Sample | None, model: str, layers: Mapping[str, Mapping[str, Any]], top_k: int | None
) -> dict[str, Any] | None:
    """The sample in the format of the report's explorer; None without a sample or if layers differ in size."""
    if sample is None or not sample.tokens or len({layer["num_experts"] for layer in layers.values()}) != 1:
        return None
    samples = {k: {layer: join_routings(each) for layer, each in of.items()} for k, of in sample.routings.items()}
    own = top_k if top_k in samples else min(samples)
    sizes = {k: {name: len(routing.experts) for name, routing in of.items()} for k, of in samples.items()}
    complete = {k: of for k, of in samples.items() if sizes[k] == sizes[own]}
    inputs = {layer: torch.cat(parts) for layer, parts in sample.hidden.items()}
    found = pack(complete, sample.tokens, inputs, own, POINTS)
    return {**found, "checkpoint": model, "split": "test", "level": "piece"}
