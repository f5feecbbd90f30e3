"""Originals as Python objects, computing in float64 wherever they ask for float32."""

from __future__ import annotations

import ast
import math
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class _Double:
    """`torch`, but what is called float32 is float64: rounding then hides no difference."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


TORCH = _Double()
GITHUB = "https://raw.githubusercontent.com"


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside it `tensor.float()` gives float64."""
    kept = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.float = kept  # type: ignore[method-assign]


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


def function_of_transformers(model_type: str, name: str) -> Any:
    """A function of the module of a model type."""
    module: Any = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    module.torch = TORCH
    return getattr(module, name)


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
