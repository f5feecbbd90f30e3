"""What the routers of a model do during an evaluation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from pointsman.control import named_routers, record_routing
from pointsman.diagnostics.collection import Diagnostics
from pointsman.ranks import Ranks
from pointsman.routing import Routing, RoutingContext


class RoutingSummary:
    """Entropy, load and experts a token of every router, streamed."""

    def __init__(self, model: nn.Module) -> None:
        self.mixed = {name: router.mix is not None for name, router in named_routers(model)}
        self.diagnostics = Diagnostics("entropy", "load")
        self.mask: Tensor | None = None  # [tokens], True where a token counts

    def watch(self, model: nn.Module) -> AbstractContextManager[Any]:
        return record_routing(model, self._take) if self.mixed else nullcontext()

    def _take(self, name: str, routing: Routing, context: RoutingContext | None) -> None:
        self.diagnostics.update(name, routing, self.mask)

    def gather(self, ranks: Ranks) -> None:
        """Adds what the other ranks have seen."""
        if ranks.count > 1:
            self.diagnostics = self.diagnostics.gather(ranks.group)

    def result(self) -> dict[str, dict[str, Any]]:
        results = {}
        for name, found in self.diagnostics.result().items():
            entropy, load = found["entropy"], found["load"]
            results[name] = {"entropy": entropy["mean"], "entropy_std": entropy["std"], "load": load["share"]}
            if load["tokens"]:
                results[name]["experts_per_token"] = load["assignments"] / load["tokens"]
            if self.mixed[name]:
                results[name]["mixed_entropy"] = entropy["mixed_mean"]
        return results
