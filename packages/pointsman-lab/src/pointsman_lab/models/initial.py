"""Initial weights: each parameter outside routers from its own generator, so that they agree between routers."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pointsman.experts.modules import ExpertNorm
from pointsman.routers.frame.router import Router
from pointsman_lab.models.blocks import FeedForward


def seed_for(seed: int, name: str) -> int:
    """A seed for each (seed, name), spread over 63 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Inside, the default generator is seeded by (seed, name); afterwards it is as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_for(seed, name))
        yield


@torch.no_grad()
def initialize(model: nn.Module, seed: int, std: float) -> None:
    """Weights ~ N(0, std^2), norms' weights ~ N(1, std^2), biases 0. Routers keep what they gave themselves.

    A dense feed-forward layer starts with the numbers of the experts that would stand in its place.
    """
    inside = {id(parameter) for module in model.modules() if isinstance(module, Router)
              for parameter in module.parameters()}  # fmt: skip
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in inside or parameter.is_meta:
                continue
            if isinstance(module, nn.LayerNorm | nn.RMSNorm | ExpertNorm) and own == "weight":
                parameter.copy_(1 + std * _draw(seed, f"{name}.{own}", parameter.shape))
            elif own == "bias" or own.startswith("b_") or (own == "w_out" and getattr(module, "starts_at_zero", False)):
                parameter.zero_()
            elif isinstance(module, FeedForward):
                parameter.copy_(
                    std * _as_experts(module, own, seed, f"{name.removesuffix('feed_forward')}moe.experts.{own}")
                )
            else:
                parameter.copy_(std * _draw(seed, f"{name}.{own}", parameter.shape))


def _draw(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed_for(seed, name))
    return torch.randn(shape, generator=generator, device="cpu")


def _as_experts(module: FeedForward, own: str, seed: int, name: str) -> Tensor:
    units, dim = module.w_in.shape
    blocks, width = module.blocks, units // module.blocks
    if own in ("w_in", "w_gate"):
        return _draw(seed, name, (blocks, width, dim)).reshape(units, dim)
    return _draw(seed, name, (blocks, dim, width)).transpose(0, 1).reshape(dim, units)
