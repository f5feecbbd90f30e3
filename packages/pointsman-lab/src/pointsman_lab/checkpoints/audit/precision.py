"""What bf16 does to the choice of a gate: on the gate's own inputs, a copy in float32 beside one in bf16."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.diagnostics import Fluctuation
from pointsman.hf.layouts import NotAGateError
from pointsman.hf.listen import GateListener
from pointsman.ops.linear import without_autocast


class Precisions:
    """Attributes:
    found: layer -> fluctuation between the gate in float32 and in bf16.
    """

    def __init__(self, listener: GateListener) -> None:
        self.listener = listener
        self.found: dict[str, Fluctuation] = {}
        self._copies: dict[str, tuple[nn.Module, nn.Module] | None] = {}  # gate -> in float32 and in bf16

    @contextmanager
    def compare(self, mask: Tensor) -> Iterator[None]:
        """Inside, every forward of a gate of the class's own is compared.

        Args:
            mask: [B * T] bool, the tokens that count.
        """
        with ExitStack() as inside:
            for name, gate in self.listener.gates.items():
                if not hasattr(gate, "pointsman"):
                    hook = partial(self._hook, name, mask)
                    inside.enter_context(gate.register_forward_hook(hook, with_kwargs=True))
            yield

    @torch.no_grad()
    def _hook(
        self, name: str, mask: Tensor, gate: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        layer = name.rpartition(".")[0]
        if layer in self.listener.unsupported:
            return
        if name not in self._copies:
            self._copies[name] = (_copy(gate, torch.float32), _copy(gate, torch.bfloat16))
        pair = self._copies[name]
        if pair is None:
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        tokens = hidden.numel() // hidden.shape[-1]
        try:
            with without_autocast(hidden.device.type):
                exact, rounded = (
                    self.listener.routing(name, one, one(hidden.to(dtype), *args[1:], **rest), tokens)
                    for one, dtype in zip(pair, (torch.float32, torch.bfloat16), strict=True)
                )
        except (RuntimeError, NotAGateError):  # the class does not run in another precision
            self._copies[name] = None
            return
        counted = mask.to(hidden.device) if mask.numel() == tokens else None
        self.found.setdefault(layer, Fluctuation()).update(exact, rounded, counted)


def _copy(gate: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy without forward hooks."""
    copied = copy.copy(gate)
    copied._forward_hooks, copied._forward_pre_hooks = type(gate._forward_hooks)(), type(gate._forward_pre_hooks)()
    copied._forward_hooks_with_kwargs = type(gate._forward_hooks_with_kwargs)()
    own = copied.__dict__.pop("forward", None)
    for name in ("_old_forward", "_hf_hook"):  # accelerate's: they lead to the gate and all around
        copied.__dict__.pop(name, None)
    made = copy.deepcopy(copied).to(dtype).eval()
    if isinstance(own, MethodType):  # a kernel's; accelerate's is none
        made.forward = MethodType(own.__func__, made)
    return made
