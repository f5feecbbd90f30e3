"""MoE layers in float64, as plainly as they can be written: every expert computes every token.

Written from the papers' equations (docs/routers), with none of the library's code. Autograd gives the gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.routers.frame.registry import ParsedSpec

Values = Mapping[str, Tensor]
"""Parameters and buffers by name, float64."""

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class Layer:
    """One layer of a stack.

    Args:
        spec: taken apart. shape: what the layer was built with: dim, num_experts, activation.
    """

    def __init__(self, spec: ParsedSpec, shape: Mapping[str, Any]):
        assert spec.choice is None, "compositions have a campaign of their own"
        self.router, self.options, self.mixer, self.mixer_options = spec[:4]
        self.shape = shape

    def __call__(
        self, hidden: Tensor, values: Values, mask: Tensor | None, experts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """hidden [B, T, dim] and the experts [N, k] that the layer chose -> output, logits, choice, losses."""
        logits, unmixed = self._probabilities(hidden, values)
        probs = unmixed
        if self.mixer == "similarity":
            probs = self._similarity(unmixed, hidden, values, mask)
        flat = probs.flatten(0, 1)
        weights = flat.gather(-1, experts.clamp_min(0))
        if self._renormalized:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-9)
        weights = weights.masked_fill(experts < 0, 0) * float(self.options.get("scale", "1"))
        each = torch.zeros_like(flat).scatter_add(-1, experts.clamp_min(0), weights)  # [N, E]
        rows = hidden.flatten(0, 1)
        computed = torch.stack([self._feed_forward(rows, values, "experts.", e) for e in range(flat.shape[-1])], 1)
        output = (each.unsqueeze(-1) * computed).sum(1)
        if "shared.w_in" in values:
            shared = self._feed_forward(rows, values, "shared.", None)
            if "shared.gate" in values:
                shared = shared * torch.sigmoid(rows @ values["shared.gate"].T)
            output = output + shared
        choice = probs if self.mixer else logits
        losses = self._losses(logits, unmixed, mask, experts)
        return output.view(hidden.shape), logits.flatten(0, 1), choice.flatten(0, 1), losses

    @property
    def _renormalized(self) -> bool:
        default = self.router != "switch" and not (self.router == "xmoe" and self.shape["top_k"] == 1)
        return {"true": True, "false": False, "none": default}[self.options.get("renormalize", "none")]

    def _probabilities(self, hidden: Tensor, values: Values) -> tuple[Tensor, Tensor]:
        gate = self.options.get("gate", "softmax")
        if self.router == "xmoe":
            tokens = hidden @ values["router.score.projection.weight"].T
            rows = values["router.score.expert_embeddings"]
            dots = tokens @ rows.T
            logits = dots / tokens.norm(dim=-1, keepdim=True).clamp_min(1e-4) / rows.norm(dim=-1).clamp_min(1e-4)
            scaled = logits / values["router.normalize.temperature"].clamp_min(1e-4)
        else:
            if self.router == "hyperrouter":
                names = [f"router.score.hypernetwork.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
                first, first_bias, second, second_bias = (values[name] for name in names)
                generated = second @ F.relu(first @ values["router.score.embedding"] + first_bias) + second_bias
                generated = generated.view(self.shape["num_experts"], -1)
                weight, bias = generated[:, :-1], generated[:, -1]
            else:
                weight, bias = values["router.score.weight"], values.get("router.score.bias", torch.zeros(()).double())
                if self.router == "frozen-temperature":
                    temperature = values["router.score.log_temperature"].exp()
                    weight, bias = weight / temperature, bias / temperature
            scaled = logits = hidden @ weight.T + bias
        return logits, torch.sigmoid(scaled) if gate == "sigmoid" else torch.softmax(scaled, -1)

    def _similarity(self, probs: Tensor, hidden: Tensor, values: Values, mask: Tensor | None) -> Tensor:
        """p_i = (1 - s) e_i + s sum_{j <= i} softmax_j(u_i W u_j / tau) e_j; padding informs no token."""
        unit = hidden / hidden.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        left = unit @ values["router.mix.weight"] if "router.mix.weight" in values else unit
        scores = left @ unit.transpose(1, 2) / values["router.mix.tau"]
        length = hidden.shape[1]
        hides = torch.ones(length, length, dtype=torch.bool).triu(1)[None]
        if mask is not None:
            own = torch.eye(length, dtype=torch.bool)
            hides = hides | (~mask[:, None, :] & ~own)
        strength = float(self.mixer_options.get("strength", "1"))
        mixed = torch.softmax(scores.masked_fill(hides, -torch.inf), -1) @ probs
        return (1 - strength) * probs + strength * mixed

    def _losses(self, logits: Tensor, probs: Tensor, mask: Tensor | None, experts: Tensor) -> list[Tensor]:
        weight = float(self.options.get("balance", "0.01" if self.router in ("switch", "xmoe") else "0"))
        real = slice(None) if mask is None else mask.flatten()
        flat = logits.flatten(0, 1)[real]
        count = max(len(flat), 1)
        losses = []
        if weight:
            usual = {"softmax": 0.3, "sigmoid": 0.07}[self.options.get("gate", "softmax")]
            temperature = float(self.options.get("tau0", usual))
            over = torch.softmax(flat / (temperature if self.router == "xmoe" else 1.0), -1)
            chosen = F.one_hot(experts[experts >= 0], flat.shape[-1]).sum(0).double()
            shares = chosen / chosen.sum().clamp_min(1)
            losses.append(weight * flat.shape[-1] * (shares * over.sum(0) / count).sum())
        if z_loss := float(self.options.get("z_loss", "0")):
            losses.append(z_loss * flat.logsumexp(-1).square().sum() / count)
        return losses

    def _feed_forward(self, rows: Tensor, values: Values, prefix: str, expert: int | None) -> Tensor:
        def get(name: str) -> Tensor:
            value = values.get(prefix + name, torch.zeros(()).double())
            return value if expert is None or prefix + name not in values else value[expert]

        units = rows @ get("w_in").T + get("b_in")
        activate = ACTIVATIONS[self.shape["activation"]]
        if prefix + "w_gate" in values:
            units = units * activate(rows @ get("w_gate").T + get("b_gate"))
        else:
            units = activate(units)
        return units @ get("w_out").T + get("b_out")


def stack(
    layers: Sequence[Layer], hidden: Tensor, values: Values, mask: Tensor | None, experts: Sequence[Tensor]
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], list[Tensor]]:
    """h <- h + layer(h) for each layer: the output, each layer's (logits, choice), all losses."""
    seen, losses = [], []
    for index, (layer, chosen) in enumerate(zip(layers, experts, strict=True)):
        own = {name.split(".", 1)[1]: value for name, value in values.items() if name.startswith(f"{index}.")}
        output, logits, choice, found = layer(hidden, own, mask, chosen)
        seen.append((logits, choice))
        losses += found
        hidden = hidden + output
    return hidden, seen, losses
