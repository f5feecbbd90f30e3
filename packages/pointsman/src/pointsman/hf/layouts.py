"""How gates are called (`Form`), and what they return, read: logits, weights and indices, or what single classes return
instead (`Layout`), also written.

Shapes: N tokens, E experts, k chosen ones. A dropped assignment is expert -1 with weight 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["softmax", "sigmoid", "other"]
Read = Callable[[Any, int, float | None], tuple[Tensor, Tensor, Tensor]]
"""(what the class returns, k, `Form.power`) -> logits [N, E], weights [N, k], experts [N, k]."""
Write = Callable[[Tensor, Tensor, Tensor, tuple[int, ...]], Any]
"""(logits [N, E], weights [N, k], experts [N, k], shape of the tokens) -> what the class returns."""


class NotAGateError(ValueError):
    """A module next to the experts does not return logits, weights and indices; the message says what it does."""


@dataclass(frozen=True)
class Form:
    """How a gate is called, and what it returns.

    Attributes:
        owner: path from the gate to the module that holds the linear map ("" = the gate itself).
        sequence: whether its input must be [B, T, dim].
        extras: names of the block's tensors that are further arguments (a correction bias).
        logits, weights, indices: positions in the returned tuple.
        kind: the function from logits to scores; "other" if neither softmax nor sigmoid.
        linear: whether the logits are exactly `multiplier` * (weight @ hidden (+ bias)).
        outputs: the length of the returned tuple; 0 in configurations of earlier versions.
        multiplier: a constant of the class between the product and the logits.
        flat: whether it returns tokens [B * T] also for an input [B, T, dim].
        layout: the class whose `Layout` says what is returned; "" = logits, weights and indices, as above.
        power: of a class whose block divides the weights by their p-norm: p; None: it does not.
        table: the gate's buffer [V, k] of the experts of each token id, if it chooses by token id.
    """

    owner: str
    sequence: bool
    extras: tuple[str, ...]
    logits: int
    weights: int
    indices: int
    kind: Kind
    linear: bool
    outputs: int = 0
    multiplier: float = 1.0
    flat: bool = False
    layout: str = ""
    power: float | None = None
    table: str = ""


def positions(kind: str, output: tuple[Any, ...], tokens: int) -> tuple[int, int, int]:
    """Positions of logits, weights and indices in the output of a gate of class `kind` for this number of tokens."""
    tensors = [
        (place, item.flatten(0, -2) if item.dim() > 1 else item[:, None])
        for place, item in enumerate(output)
        if isinstance(item, Tensor) and item.dim() > 0
    ]
    tensors = [(place, item) for place, item in tensors if item.shape[0] == tokens]
    integers = [(place, item) for place, item in tensors if not item.is_floating_point() and item.dtype != torch.bool]
    floats = [(place, item) for place, item in tensors if item.is_floating_point()]
    if len(integers) != 1:
        raise NotAGateError(f"{kind} does not return the chosen experts [tokens, k]")
    indices, chosen = integers[0]
    if not chosen.shape[1]:
        raise NotAGateError(f"{kind} chooses no expert: its k is 0")
    if chosen.shape[1] > 1 and bool((chosen.sort(-1).values.diff(dim=-1) == 0).any()):
        raise NotAGateError(f"{kind} returns a mask over experts, not the chosen experts [tokens, k]")
    wide = [place for place, item in floats if item.shape[1] > chosen.shape[1]]
    narrow = [place for place, item in floats if item.shape == chosen.shape]
    if not wide and len(narrow) >= 2:  # k = E: every class returns the logits first
        wide, narrow = narrow[:1], narrow[1:]
    if not wide or not narrow:
        raise NotAGateError(f"{kind} does not return logits [tokens, experts] and weights [tokens, k]")
    return wide[0], narrow[0], indices


@dataclass(frozen=True)
class Layout:
    """What one class of gates returns.

    Attributes:
        kind: the function from logits to scores.
        read, write: between its output and a routing. `write` None: its block chooses, after the logits.
        weights: position of the weights in its output; None: its output is the logits.
        block: the class of its block, where that has no child `experts`.
        sequence: whether its rule depends on the sequences: it is called with [B, T, dim].
        fixed_k: its k, where that cannot be changed.
        own_k: whether the model's configuration uses its k for something else, too.
        options: options of every counterpart, which say what the block does with the weights.
        rules: routers, besides those for all classes, whose rule it can express.
        allowed: options of them that no other class allows.
        note: what its block does with the routing that nobody expects.
    """

    kind: Kind
    read: Read
    write: Write | None
    weights: int | None
    block: str = ""
    sequence: bool = False
    fixed_k: int | None = None
    own_k: bool = False
    options: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    note: str = ""

    def carrier(self, output: Any) -> Tensor:
        """The tensor through which the block's gradient reaches the router."""
        tensor: Tensor = output if self.weights is None else output[self.weights]
        return tensor

    def replaced(self, output: Any, carrier: Tensor) -> Any:
        """The output with another `carrier`."""
        if self.weights is None:
            return carrier
        return (*output[: self.weights], carrier, *output[self.weights + 1 :])


def _dense(logits: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """[N, E]: the weights at their experts."""
    zeros = torch.zeros_like(logits[:, :1]).expand(-1, logits.shape[1] + 1)
    return zeros.scatter(1, experts + 1, weights.to(logits.dtype))[:, 1:]


def _read_llama4(output: Any, k: int, power: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(scores [N, E], 0 where not chosen; logits [N, E])."""
    scores, logits = output
    experts = (logits - 1e6 * (scores == 0)).topk(k, dim=-1).indices  # a chosen one may underflow to 0
    return logits, scores.gather(1, experts), experts


def _write_llama4(logits: Tensor, weights: Tensor, experts: Tensor, shape: tuple[int, ...]) -> Any:
    return _dense(logits, weights, experts), logits


def _read_dbrx(output: Any, k: int, power: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, E]; the block takes the k best of their softmax, divided by their p-norm."""
    weights, experts = torch.softmax(output, -1).topk(k, dim=-1)
    if power is not None:
        weights = weights / torch.norm(weights, p=power, dim=-1, keepdim=True)
    return output, weights, experts


def _read_jetmoe(output: Any, k: int, power: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(assignment [N k] and its token, sorted by expert; their weights; tokens of each expert; logits [N, E])."""
    order, _, sorted_weights, sizes, logits = output
    counts = torch.tensor(sizes, device=logits.device)
    sorted_experts = torch.repeat_interleave(torch.arange(len(sizes), device=logits.device), counts)
    experts = torch.empty_like(order).scatter(0, order, sorted_experts)
    weights = torch.empty_like(sorted_weights).scatter(0, order, sorted_weights)
    return logits, weights.view(-1, k), experts.view(-1, k)


def _write_jetmoe(logits: Tensor, weights: Tensor, experts: Tensor, shape: tuple[int, ...]) -> Any:
    order = experts.flatten().argsort(stable=True)
    sizes = torch.bincount(experts.flatten(), minlength=logits.shape[1]).tolist()
    return order, order // experts.shape[1], weights.flatten()[order], sizes, logits


def _read_switch(output: Any, k: int, power: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(0 or 1 [B, T, E], all 0 where capacity dropped the token; its weight [B, T, 1]; logits [B, T, E])."""
    mask, weights, logits = (tensor.reshape(-1, tensor.shape[-1]) for tensor in output)
    kept = mask.any(-1, keepdim=True)
    return logits, weights * kept, mask.argmax(-1, keepdim=True).masked_fill(~kept, -1)


def _write_switch(logits: Tensor, weights: Tensor, experts: Tensor, shape: tuple[int, ...]) -> Any:
    mask = _dense(logits, (experts >= 0).to(logits.dtype), experts).long()
    return tuple(tensor.reshape(*shape, -1) for tensor in (mask, weights, logits))


def _read_nllb(output: Any, k: int, power: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(0 or 1 of the first choice [N, E]; weights of both [N, E]; logits [N, E])."""
    _, combined, logits = output
    experts = logits.topk(k, dim=-1).indices
    weights = combined.gather(1, experts)
    return logits, weights, experts.masked_fill(weights == 0, -1)


def _write_nllb(logits: Tensor, weights: Tensor, experts: Tensor, shape: tuple[int, ...]) -> Any:
    first = experts[:, :1]
    mask = _dense(logits, (first >= 0).to(logits.dtype), first).long()
    return mask, _dense(logits, weights, experts), logits


LAYOUTS = {
    "Llama4Router": Layout("sigmoid", _read_llama4, _write_llama4, 0, options=("weigh=input",)),
    "DbrxRouter": Layout("softmax", _read_dbrx, None, None),
    "JetMoeTopKGating": Layout("softmax", _read_jetmoe, _write_jetmoe, 2, block="JetMoeMoE", own_k=True),
    "SwitchTransformersTop1Router": Layout(
        "softmax", _read_switch, _write_switch, 1, sequence=True, fixed_k=1, rules=("switch",),
        allowed=("capacity", "capacity_unit"),
    ),
    "NllbMoeTop2Router": Layout(
        "softmax", _read_nllb, _write_nllb, 1, fixed_k=2,
        note="NllbMoeSparseMLP of transformers 5.24 runs experts 0 and 1 alone: its experts read the mask of first "
        "choices as an index. The figures are of what its router chose",
    ),
}  # fmt: skip
"""Class of the gate -> what it returns."""
JITTER: dict[str, tuple[str, float | None]] = {
    "DbrxRouter": ("moe_jitter_eps", None), "PhimoeTopKRouter": ("input_jitter_noise", 0.0),
    "SwitchTransformersTop1Router": ("jitter_noise", 0.0),
}  # fmt: skip
"""Class of the gate -> the attribute with the reach of its input's noise in training, and the value for none."""


def first_k(module: nn.Module, block: nn.Module, form: Form) -> int:
    """The k of a gate; 1 where neither gate nor block keeps one."""
    layout = LAYOUTS.get(form.layout)
    if layout is not None and layout.fixed_k is not None:
        return layout.fixed_k
    return next((k for one in (module, block) if isinstance(k := getattr(one, "top_k", None), int)), 1)


def read_output(form: Form, module: nn.Module, block: nn.Module, output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [tokens, E], weights [tokens, k] and experts [tokens, k] from the output of a gate of this form."""
    layout = LAYOUTS.get(form.layout)
    if layout is not None:
        return layout.read(output, first_k(module, block, form), form.power)
    logits, weights, experts = (output[place].flatten(0, -2) for place in (form.logits, form.weights, form.indices))
    return logits, weights, experts


def read_any(
    form: Form | None, module: nn.Module, block: nn.Module, output: Any, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`read_output`, by what is returned if the form is not known; NotAGateError if no gate returns that."""
    if form is None and not isinstance(output, tuple):
        raise NotAGateError(f"{type(module).__name__} returns {type(output).__name__}, not what it chose")
    if form is None:
        form = Form("", False, (), *positions(type(module).__name__, output, tokens), "other", False)
    logits, weights, experts = (one.reshape(tokens, -1) for one in read_output(form, module, block, output))
    return logits, weights, experts


@torch.no_grad()
def kind_of(logits: Tensor, weights: Tensor, experts: Tensor) -> Kind:
    """The function of the logits to which a token's weights are proportional; with one expert a token, all tokens'."""
    if not len(logits):
        return "other"
    across = 1 if experts.shape[1] > 1 else 0
    actual, chosen = F.normalize(weights.float(), p=1, dim=across), experts.long().clamp_min(0)
    scores: dict[Kind, Tensor] = {
        "softmax": torch.softmax(logits.float(), -1),
        "sigmoid": torch.sigmoid(logits.float()),
    }
    expected = {kind: F.normalize(one.gather(1, chosen), p=1, dim=across) for kind, one in scores.items()}
    near = {kind: float((actual - one).abs().max()) for kind, one in expected.items()}
    best = min(near, key=lambda kind: near[kind])
    return best if near[best] < 0.1 * max(near.values()) else "other"


def full_scores(form: Form | None, logits: Tensor, weights: Tensor, experts: Tensor, shares: bool = False) -> Tensor:
    """Softmax or sigmoids of the logits [N, E]; where its form does not tell, what its weights say. Float32 at least.

    Scores that are neither count as softmax, also those of one expert a token whose weight is always 1, which tells
    nothing. `shares`: sigmoids are divided by their sum.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    linear = form is not None and form.linear
    if not linear and bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-3).all()):
        return logits  # a few classes return probabilities instead
    if (kind_of(logits, weights, experts) if form is None or form.kind == "other" else form.kind) != "sigmoid":
        return torch.softmax(logits, -1)
    found = torch.sigmoid(logits)
    return found / found.sum(-1, keepdim=True).clamp_min(torch.finfo(found.dtype).tiny) if shares else found
