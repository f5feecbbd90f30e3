"""Originals as Python objects, computing in float64 wherever they ask for float32."""

import ast
import math
import subprocess
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from pointsman import build_router
from pointsman.routers.frame.router import Router
from pointsman.routing import Routing

DIM, EXPERTS, K, TOKENS = 16, 8, 2, 96


@dataclass
class Case:
    """What one side computed.

    Attributes:
        weights: [N, columns], the combine weight of every expert at every token.
        losses: by name.
        leaves: what gradients are taken of, by name; the same names on both sides.
    """

    weights: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    leaves: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A row: `compare`, given the folder of originals, computes both sides.

    Attributes:
        original: its name in the table; where: from where it is.
    """

    spec: str
    original: str
    where: str
    compare: Callable[[Path | None], tuple[Case, Case]]


def hidden_states() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, TOKENS, DIM, dtype=torch.float64, generator=generator)


def ours(spec: str, k: int = K) -> Any:
    """Our router in float64; Any, as its stages have parameters of their own."""
    torch.manual_seed(1)
    return build_router(spec, dim=DIM, num_experts=EXPERTS, top_k=k).double()


def routed(router: Router, leaves: Mapping[str, Tensor]) -> Case:
    """What our router says of the hidden states."""
    hidden = hidden_states().requires_grad_()
    torch.manual_seed(3)
    routing: Routing = router.train()(hidden)
    return Case(routing.dense_weights, routing.losses, {"hidden": hidden, **leaves})


def scattered(weights: Tensor, experts: Tensor, columns: int) -> Tensor:
    """[N, columns] of weights and experts [N, k]."""
    return weights.new_zeros(len(weights), columns).scatter_add(1, experts, weights)


def beside(router: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and the weight for the other side's computation, which our linear router takes too."""
    with torch.no_grad():
        router.score.weight.copy_(weight)
    return hidden_states().requires_grad_(), weight.detach().clone().requires_grad_()


def both(
    router: Any, hidden: Tensor, weight: Tensor, weights: Tensor, losses: Mapping[str, Tensor] | None = None
) -> tuple[Case, Case]:
    """Our linear router's case, and the other side's with these weights and losses."""
    other = Case(weights, losses or {}, {"hidden": hidden, "weight": weight})
    return routed(router, {"weight": router.score.weight}), other


class _Double:
    """`torch`, but what is called float32 is float64: rounding then hides no difference."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


TORCH = _Double()
GITHUB = "https://raw.githubusercontent.com"


def in_float64() -> AbstractContextManager[object]:
    """Inside it `tensor.float()` gives float64."""
    return mock.patch.object(torch.Tensor, "float", torch.Tensor.double)


def of_transformers(model_type: str, name: str, *arguments: Any, **settings: Any) -> Any:
    """A class of transformers, built from the configuration of `model_type` with `settings`; random parameters."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

    folder = model_type_to_module_name(model_type)
    module: Any = import_module(f"transformers.models.{folder}.modeling_{folder}")
    module.torch = TORCH
    config = CONFIG_MAPPING[model_type]()
    for key, value in settings.items():
        setattr(config, key, value)
    built: nn.Module = getattr(module, name)(config, *arguments)
    with torch.no_grad():
        for tensor in (*built.parameters(), *built.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, dtype=torch.float64) * (0.3 if tensor.dim() == 1 else 1))
    return built.double()


class NotFetchedError(Exception):
    """Why an original cannot be had here."""


@dataclass(frozen=True)
class File:
    """A file of a public repository."""

    repository: str
    commit: str
    path: str

    @property
    def where(self) -> str:
        """Repository and commit in short."""
        return f"{self.repository}@{self.commit[:12]}"

    def text(self, originals: Path | None) -> str:
        """Its text, from a copy of the repository in the folder `originals` (owner+name), or from GitHub."""
        if originals is not None:
            folder = originals / self.repository.replace("/", "+")
            folder = folder / "repo" if (folder / "repo").is_dir() else folder
            command = ["git", "-C", str(folder), "show", f"{self.commit}:{self.path}"]
            found = subprocess.run(command, capture_output=True, text=True, check=False)
            if found.returncode:
                raise NotFetchedError(f"{self.commit[:12]} of {self.repository} is not in {originals}")
            return found.stdout
        address = f"{GITHUB}/{self.repository}/{self.commit}/{self.path}"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                return str(answer.read().decode())
        except OSError as error:
            raise NotFetchedError(f"GitHub does not answer: {error}") from None

    def load(self, originals: Path | None, names: Sequence[str], **given: Any) -> Mapping[str, Any]:
        """The functions and classes called `names`, and nothing else of the file, run with torch and `given`."""
        tree = ast.parse(self.text(originals))
        tree.body = [one for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name in names]
        if len(tree.body) != len(names):
            raise NotFetchedError(f"{self.path} at {self.commit[:12]} has no {', '.join(names)}")
        for one in tree.body:
            if isinstance(one, ast.FunctionDef):
                one.decorator_list = []  # a compiler of scripts wants a file
        tree.body.insert(0, ast.parse("from __future__ import annotations").body[0])
        space: dict[str, Any] = {"torch": TORCH, "nn": nn, "F": nn.functional, "Tensor": Tensor, "math": math, **given}
        exec(compile(tree, self.path, "exec"), space)
        return space
