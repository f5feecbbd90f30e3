"""Sequences: random programs over MoE layers, each result against plain float64 (`plain.py`).

Every step starts from the layers' own weights, so that no rounding adds up: what is compared is one step's output,
gradients (also those added up over several), and the weights after an optimizer's step.
"""

import copy
import io
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import plain
import torch
from frame import Campaign, Program, Wrong
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import pointsman
from pointsman import MoE, RoutingContext

ROUTERS = [
    "smoe", "smoe:gate=sigmoid:bias=false", "smoe:balance=0.1:z_loss=0.01", "smoe:renormalize=false:balance=0.05",
    "smoe:scale=2.5", "switch", "switch:gate=sigmoid:balance=0.2", "smoe-dropout", "smoe-dropout:balance=0.1",
    "frozen-temperature:z_loss=0.1", "hyperrouter:hyper_dim=8:embed_dim=6", "hyperrouter:hyper_dim=4:balance=0.1",
    "xmoe:routing_dim=3", "xmoe:gate=sigmoid", "xmoe:routing_dim=2:balance=0.5:z_loss=0.02",
]  # fmt: skip
MIXERS = ["", "", "", "+similarity", "+similarity:strength=0.5", "+similarity:learned=true:tau=0.5"]
TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 0.1}
"""Of a tensor's error, relative to the tensor's norm."""
SLACK = 10.0


class Stack(nn.ModuleList):
    """h <- h + layer(h)."""

    def forward(self, hidden: Tensor, context: RoutingContext | None = None, again: bool = False) -> Tensor:
        for layer in self:
            if again:
                hidden = hidden + checkpoint(layer, hidden, context, use_reentrant=False)
            else:
                hidden = hidden + layer(hidden, context)
        return hidden


class State:
    """A stack of layers, and what plain float64 says it must be.

    Attributes:
        grads: the gradients added up since the last step, by name.
        slack: what they may differ by beyond the tolerance, by name.
        left: copies that were made of the stack, with their weights then: nothing done to the stack may change them.
    """

    def __init__(self, shape: dict[str, Any]) -> None:
        self.shape = shape
        self.stack = build(shape)
        self.specs = [layer.router.spec for layer in self.stack]
        self.dtype, self.scale = "float32", 1.0
        self.grads: dict[str, Tensor] = {}
        self.slack: dict[str, float] = {}
        self.left: list[tuple[Stack, dict[str, Tensor]]] = []

    def add(self, grads: dict[str, Tensor], slack: dict[str, float], times: int = 1) -> None:
        for name, gradient in grads.items():
            self.grads[name] = self.grads.get(name, 0) + times * gradient
            self.slack[name] = self.slack.get(name, 0.0) + times * slack[name]

    def values(self) -> dict[str, Tensor]:
        """Weights and buffers in float64, those that train with requires_grad."""
        found = {name: copied(value) for name, value in self.stack.named_buffers()}
        for name, value in self.stack.named_parameters():
            found[name] = copied(value).requires_grad_(value.requires_grad)
        return found

    def expected(self, hidden: Tensor, mask: Tensor | None, chosen: list[Tensor], values: dict[str, Tensor]) -> Any:
        """Output and losses in float64; Wrong unless the chosen experts are the best ones."""
        layers = [plain.Layer(pointsman.routers.frame.registry.parse_spec(spec), self.shape) for spec in self.specs]
        output, seen, losses = plain.stack(layers, hidden, values, mask, chosen)
        real = slice(None) if mask is None else mask.flatten()
        for index, (experts, (_, choice)) in enumerate(zip(chosen, seen, strict=True)):
            k = self.stack[index].top_k
            if mask is not None and (experts[~real] >= 0).any():
                raise Wrong(f"layer {index}: an expert was chosen for padding")
            rows, scores = experts[real], choice[real].detach()
            if not rows.numel():
                continue
            if rows.shape[1] != k or any(len(set(row)) != k or min(row) < 0 for row in rows.tolist()):
                raise Wrong(f"layer {index}: not {k} different experts: {rows.tolist()}")
            worst = scores.gather(-1, rows).min(-1).values
            others = scores.scatter(-1, rows, -torch.inf).max(-1).values
            slack = TOLERANCE[self.dtype] * (1 + scores.abs().max())
            if bool((others > worst + slack).any()):
                raise Wrong(f"layer {index}: a better expert was left out, by {float((others - worst).max()):.3g}")
        return output, losses


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64, copy=True)


def build(shape: dict[str, Any]) -> Stack:
    torch.manual_seed(shape["seed"])
    layers = [
        MoE(
            shape["dim"], shape["hidden_dim"], shape["num_experts"], top_k=shape["top_k"], router=spec,
            activation=shape["activation"], gated=shape["gated"], bias=shape["bias"], attach_losses=shape["attach"],
            shared_experts=shape["shared"], shared_gate=shape["shared"] == 2,
        )
        for spec in shape["routers"]
    ]  # fmt: skip
    stack = Stack(layers)
    with torch.no_grad():
        for name, parameter in stack.named_parameters():  # initial values hide mistakes: zero biases, equal logits
            noise = 0.3 * torch.randn_like(parameter)
            if name.endswith("normalize.temperature"):  # near 0 every rounding of a cosine is a large one of a logit
                parameter.mul_(noise.exp())
            else:
                parameter.add_(noise)
    pointsman.step_end(stack)
    return stack


class Sequences(Campaign):
    name, unit, usual, limit = "sequences", "operations", 1_500, 120.0

    def prepare(self, folder: Path) -> None:
        check(draw(Random(0)))  # imports what is imported late

    def draw(self, random: Random) -> Program:
        return draw(random)

    def check(self, program: Program, folder: Path) -> Counter[str]:
        return check(program)

    def simpler(self, step: Any) -> Iterator[Any]:
        name, values = step
        for key, plainest in {**PLAINEST, **SMALLEST}.items():
            if key in values and values[key] != plainest:
                yield [name, {**values, key: plainest}]
        if name == "build" and len(values["routers"]) > 1:
            for router in values["routers"]:
                yield [name, {**values, "routers": [router]}]


PLAINEST = {"masked": False, "again": False, "twice": False, "flat": False, "strided": False, "part": False}
SMALLEST = {"batch": 1, "length": 1, "shared": 0, "gated": False, "bias": False, "activation": "relu", "threads": 2}


def draw(random: Random) -> Program:
    program: Program = [["build", drawn_shape(random)]]
    names = list(WEIGHTS)
    for _ in range(30):
        name = random.choices(names, [WEIGHTS[name] for name in names])[0]
        program.append([name, DRAWN[name](random)])
    return program


def drawn_shape(random: Random) -> dict[str, Any]:
    num_experts = random.choice([1, 2, 3, 5, 8])
    one = random.choice(ROUTERS) + random.choice(MIXERS)
    return {
        "seed": random.randrange(1000), "dim": random.choice([4, 6, 8, 16]), "hidden_dim": random.choice([3, 8, 16]),
        "num_experts": num_experts, "top_k": random.randint(1, num_experts),
        "routers": [one, random.choice(ROUTERS)] if random.random() < 0.4 else [one],
        "activation": random.choice(["relu", "gelu", "silu"]), "gated": random.random() < 0.4,
        "bias": random.random() < 0.7, "shared": random.choice([0, 0, 0, 1, 2]), "attach": random.random() < 0.7,
    }  # fmt: skip


def drawn_input(random: Random) -> dict[str, Any]:
    return {
        "seed": random.randrange(10**6), "batch": random.choice([1, 1, 2, 3]),
        "length": random.choice([0, 1, 2, 5, 9, 16, 33]), "masked": random.random() < 0.3,
        "flat": random.random() < 0.2, "strided": random.random() < 0.2,
    }  # fmt: skip


DRAWN: dict[str, Callable[[Random], dict[str, Any]]] = {
    "train": lambda random: {
        **drawn_input(random), "again": random.random() < 0.25, "twice": random.random() < 0.15,
        "part": random.random() < 0.15,
    },
    "step": lambda random: {"rate": random.choice([0.001, 0.01, 0.1])},
    "evaluate": lambda random: {**drawn_input(random), "mode": random.choice(["no_grad", "inference", "grad"])},
    "threads": lambda random: {**drawn_input(random), "threads": random.choice([2, 3]), "train": random.random() < 0.5},
    "k": lambda random: {"k": random.randint(1, 8)},
    "inner_k": lambda random: {**drawn_input(random), "k": random.randint(1, 8)},
    "dtype": lambda random: {"dtype": random.choice(["float32", "float32", "float64", "bfloat16"])},
    "copy": lambda random: {"pickled": random.random() < 0.4},
    "reload": lambda random: {"seed": random.randrange(1000)},
    "freeze": lambda random: {"role": random.choice(["router", "experts"]), "thaw": random.random() < 0.6},
    "write": lambda random: {"place": random.random(), "how": random.choice(["mul_", "data", "copy_", "assign"])},
    "scale": lambda random: {"scale": random.choice([0.25, 1.0, 64.0])},
    "functional": lambda random: {**drawn_input(random), "factor": random.choice([0.5, 2.0])},
    "materialize": lambda random: {},
    "build": drawn_shape,
}  # fmt: skip
WEIGHTS = {
    "train": 10, "step": 5, "evaluate": 6, "threads": 2, "k": 4, "inner_k": 2, "dtype": 2, "copy": 1, "reload": 1,
    "freeze": 1, "write": 3, "scale": 1, "functional": 1, "materialize": 0.3, "build": 0.5,
}  # fmt: skip


def check(program: Program) -> Counter[str]:
    """Runs a program; Wrong at the first step that differs from plain float64."""
    state = State({**drawn_shape(Random(0)), "routers": ["smoe"]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # k = 1 renormalised, steps without step_end: meant here
        for number, (name, values) in enumerate(program):
            try:
                state = STEPS[name](state, values) or state
                keep_conditioned(state)
                for kept, weights in state.left:
                    compare(state.dtype, {n: p.detach() for n, p in kept.named_parameters()}, weights, "a copy's", 0.0)
            except Wrong as wrong:
                raise Wrong(f"step {number}, {name} {values}: {wrong}") from None
    return Counter(operations=len(program))


def keep_conditioned(state: State) -> None:
    """Temperatures and weights back to where rounding is not made a thousand times larger."""
    with torch.no_grad():
        for name, p in state.stack.named_parameters():
            if name.endswith("normalize.temperature"):
                p.data.clamp_(0.05, 5.0)
            elif p.abs().max() > 2:
                p.data.mul_(1 / p.abs().max())


def compare(
    dtype: str, found: dict[str, Tensor], wanted: dict[str, Tensor], what: str, within: float = -1, slack: Any = None
) -> None:
    """Wrong unless every tensor's error is within the tolerance of its norm, and a share of it of the largest norm.

    The share is for sums in which large terms cancel, such as the gradient of a scalar. `slack` allows more by name:
    see `trained`.
    """
    largest = max([1.0, *(float(tensor.detach().norm()) for tensor in wanted.values())])
    for name, tensor in wanted.items():
        if name not in found:
            raise Wrong(f"{what} {name} is missing")
        got = found[name].detach().double()
        error, size = float((got - tensor.detach()).norm()), float(tensor.detach().norm())
        allowed = (TOLERANCE[dtype] if within < 0 else within) * size
        if within < 0:
            allowed += TOLERANCE[dtype] * (0.2 if dtype == "bfloat16" else 0.01) * largest + (slack or {}).get(
                name, 0.0
            )
        if not error <= allowed:
            raise Wrong(f"{what} {name}: error {error:.3g} in a tensor of norm {size:.3g} ({dtype})")


def made(state: State, values: dict[str, Any], offset: int = 0) -> tuple[Tensor, Tensor | None, Tensor]:
    """Hidden states [B, T, dim], a mask or None, and the output's coefficients, all exact in the stack's dtype."""
    generator = torch.Generator().manual_seed(values["seed"] + offset)
    batch, length = values["batch"], values["length"]
    shape = (batch, length, state.shape["dim"])
    dtype = getattr(torch, state.dtype)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    coefficients = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(batch, length, generator=generator) < 0.7 if values["masked"] else None
    return hidden, mask, coefficients


def laid_out(hidden: Tensor, values: dict[str, Any]) -> Tensor:
    """The same numbers as the step wants them: not contiguous, or as one sequence."""
    if values["strided"]:
        hidden = hidden.transpose(0, 2).contiguous().transpose(0, 2)
    return hidden.flatten(0, 1) if values["flat"] and len(hidden) == 1 else hidden


def routed(stack: Stack, call: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What `call` returns, and the experts that each layer chose in it, in this thread."""
    chosen: dict[str, Tensor] = {}
    here = threading.get_ident()

    def note(name: str, routing: Any, context: Any) -> None:
        if threading.get_ident() == here:
            chosen[name] = routing.experts.clone()

    with pointsman.record_routing(stack, note):
        output = call()
    return output, [chosen[str(index)] for index in range(len(stack))]


def train(state: State, values: dict[str, Any]) -> None:
    state.stack.train()
    hidden, mask, coefficients = made(state, values)
    passes = 2 if values["twice"] else 1
    grads, slack = trained(state, values, hidden, mask, coefficients, passes)
    state.add(grads, slack, passes)
    compare_grads(state)


def trained(
    state: State, values: dict[str, Any], hidden: Tensor, mask: Tensor | None, coefficients: Tensor, passes: int = 1
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """One forward and `passes` backwards of it; compares output and input gradient.

    Returns the gradients expected of the weights, and what they may differ by beyond the tolerance: SLACK times
    the error of the reference itself in this dtype (large where a gate is saturated, or a temperature near 0).
    """
    given = laid_out(hidden, values).clone().requires_grad_()
    context = RoutingContext(padding_mask=mask)
    again = values.get("again", False)
    output, chosen = routed(state.stack, lambda: state.stack(given, context, again))
    loss = (output.view(hidden.shape) * coefficients).sum(dtype=torch.float64 if state.dtype == "float64" else None)
    if not state.shape["attach"]:
        loss = pointsman.add_losses(loss, state.stack)
    exact = state.values()
    wanted, input_grad, grads = reference(state, exact, hidden.double(), mask, chosen, coefficients)
    dtype = getattr(torch, state.dtype)
    rounded = {name: value.detach().to(dtype).requires_grad_(value.requires_grad) for name, value in exact.items()}
    _, input_slack, found = reference(state, rounded, hidden.to(dtype), mask, chosen, coefficients)
    slack = {name: SLACK * float((value.double() - grads[name]).norm()) for name, value in found.items()}
    compare(state.dtype, {"output": output.view(hidden.shape)}, {"output": wanted}, "the")
    if values.get("part"):
        parameters = {name: p for name, p in state.stack.named_parameters() if p.requires_grad}
        some = dict(list(parameters.items())[:: 1 + values["seed"] % 3])
        if not some:  # all is frozen
            return {}, {}
        got = torch.autograd.grad(loss, list(some.values()), allow_unused=True)
        zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(some.values(), got, strict=True)]
        compare(
            state.dtype,
            dict(zip(some, zeros, strict=True)),
            {name: grads[name] for name in some},
            "gradient of",
            slack=slack,
        )
        return {}, {}
    if loss.requires_grad:
        for left in reversed(range(passes)):
            loss.backward(retain_graph=left > 0)
    own = torch.zeros_like(given) if given.grad is None else given.grad
    room = {"input": SLACK * passes * float((input_slack.double() - input_grad).norm())}
    compare(
        state.dtype, {"input": own.view(hidden.shape)}, {"input": passes * input_grad}, "gradient of the", slack=room
    )
    return grads, slack


def reference(
    state: State, exact: dict[str, Tensor], hidden: Tensor, mask: Tensor | None, chosen: list[Tensor], weights: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of the input, gradients by name, of the weighted sum of the output and the losses."""
    inner = hidden.detach().clone().requires_grad_()
    wanted, losses = state.expected(inner, mask, chosen, exact)
    scale = state.scale if state.shape["attach"] else 1.0
    total = (wanted * weights.double()).sum() + scale * sum(losses, torch.zeros(()).double())
    names = [name for name, value in exact.items() if value.requires_grad]
    found = torch.autograd.grad(total, [inner, *(exact[name] for name in names)], allow_unused=True)
    grads = {name: torch.zeros_like(exact[name]) if g is None else g for name, g in zip(names, found[1:], strict=True)}
    return wanted, found[0], grads


def compare_grads(state: State) -> None:
    got = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in state.stack.named_parameters()
        if name in state.grads
    }
    compare(state.dtype, got, state.grads, "gradient of", slack=state.slack)


def step(state: State, values: dict[str, Any]) -> None:
    """SGD; then X-MoE's norms and temperature are restored where they train."""
    before = state.values()
    optimizer = torch.optim.SGD([p for p in state.stack.parameters() if p.requires_grad] or [torch.zeros(1)], lr=0.0)
    for group in optimizer.param_groups:
        group["lr"] = values["rate"]
    tracked = pointsman.track_steps(state.stack, optimizer)
    exact = {name: copied(p.grad) for name, p in state.stack.named_parameters() if p.grad is not None}
    optimizer.step()
    tracked.remove()
    after = {}
    for name, value in before.items():
        new = value.detach()
        if value.requires_grad and name in exact:
            new = new - values["rate"] * exact[name]
        if value.requires_grad and name.endswith("expert_embeddings"):
            new = new / new.norm(dim=-1, keepdim=True).clamp_min(1e-12) * 0.1
        if value.requires_grad and name.endswith("temperature") and "log" not in name:
            new = new.clamp_min(1e-4)
        after[name] = new
    compare(state.dtype, {**dict(state.stack.named_buffers()), **dict(state.stack.named_parameters())}, after, "new")
    state.stack.zero_grad(set_to_none=values["rate"] < 0.1)
    state.grads, state.slack = {}, {}


def evaluate(state: State, values: dict[str, Any]) -> None:
    state.stack.eval()
    hidden, mask, _ = made(state, values)
    with {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[values["mode"]]():
        output, chosen = routed(
            state.stack, lambda: state.stack(laid_out(hidden, values), RoutingContext(padding_mask=mask))
        )
    wanted, _ = state.expected(hidden.double(), mask, [one.clone() for one in chosen], state.values())
    compare(state.dtype, {"output": output.view(hidden.shape)}, {"output": wanted}, "the")


def threads(state: State, values: dict[str, Any]) -> None:
    """Forwards at the same time, of the same layers; in training their gradients add up."""
    train_ = values["train"] and state.shape["attach"]  # kept losses are those of all forwards together
    state.stack.train(train_)
    grads: list[tuple[dict[str, Tensor], dict[str, float]]] = []
    errors: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            hidden, mask, coefficients = made(state, values, offset)
            if train_:
                grads.append(trained(state, values, hidden, mask, coefficients))
                return
            with torch.no_grad():
                output, chosen = routed(
                    state.stack, lambda: state.stack(laid_out(hidden, values), RoutingContext(padding_mask=mask))
                )
            wanted, _ = state.expected(hidden.double(), mask, chosen, state.values())
            compare(state.dtype, {"output": output.view(hidden.shape)}, {"output": wanted}, "the")
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=work, args=(offset,)) for offset in range(values["threads"])]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    for found, slack in grads:
        state.add(found, slack)
    if train_:
        compare_grads(state)


def set_k(state: State, values: dict[str, Any]) -> None:
    pointsman.set_top_k(state.stack, min(values["k"], state.shape["num_experts"]))


def inner_k(state: State, values: dict[str, Any]) -> None:
    before = [layer.top_k for layer in state.stack]
    with pointsman.set_top_k(state.stack, min(values["k"], state.shape["num_experts"])):
        evaluate(state, {**values, "mode": "no_grad"})
    if [layer.top_k for layer in state.stack] != before:
        raise Wrong("k was not restored")


def cast(state: State, values: dict[str, Any]) -> None:
    """What trains has the new dtype, fixed buffers keep at least float32."""
    before = state.values()
    state.dtype = values["dtype"]
    dtype = getattr(torch, state.dtype)
    state.stack.to(dtype)
    for name, p in state.stack.named_parameters():
        if p.dtype != dtype or not torch.equal(p.detach(), before[name].detach().to(dtype)):
            raise Wrong(f"{name} is {p.dtype}, or not the weight of before in {dtype}")
    compare("float32", dict(state.stack.named_buffers()), {n: before[n] for n, _ in state.stack.named_buffers()}, "the")
    for name, p in state.stack.named_parameters():
        if name in state.grads:
            state.grads[name] = copied(torch.zeros_like(p) if p.grad is None else p.grad)


def duplicate(state: State, values: dict[str, Any]) -> None:
    """Goes on with a copy; the original must stay as it is."""
    weights = {name: copied(p) for name, p in state.stack.named_parameters()}
    original = state.stack
    if values["pickled"]:
        buffer = io.BytesIO()
        torch.save(state.stack, buffer)
        buffer.seek(0)
        state.stack = torch.load(buffer, weights_only=False)
        state.stack.zero_grad()
    else:
        state.stack = copy.deepcopy(state.stack)
    state.grads = {}  # neither PyTorch's copy of a parameter nor its pickle has the gradient
    state.left = [*state.left[-2:], (original, weights)]


def reload(state: State, values: dict[str, Any]) -> None:
    other = build({**state.shape, "seed": values["seed"], "routers": state.specs})
    other.to(getattr(torch, state.dtype))
    other.load_state_dict(state.stack.state_dict())
    for new, old in zip(other.parameters(), state.stack.parameters(), strict=True):
        new.requires_grad_(old.requires_grad)
    for new_layer, layer in zip(other, state.stack, strict=True):
        pointsman.set_top_k(new_layer, layer.top_k)
    if state.shape["attach"]:
        pointsman.set_loss_scale(other, state.scale)
    state.stack, state.grads = other, {}


def freeze(state: State, values: dict[str, Any]) -> None:
    if values["thaw"]:
        state.stack.requires_grad_(True)
    else:
        pointsman.freeze(state.stack, values["role"])


def write(state: State, values: dict[str, Any]) -> None:
    """A weight is written in one of the ways that people do it; nothing may go on with the old one."""
    parameters = list(state.stack.parameters())
    chosen = parameters[int(values["place"] * len(parameters))]
    new = chosen.detach() * -0.75
    with torch.no_grad():
        if values["how"] == "mul_":
            chosen.mul_(-0.75)
        elif values["how"] == "data":
            chosen.data.mul_(-0.75)
        elif values["how"] == "copy_":
            chosen.copy_(new)
        else:
            chosen.data = new


def scale(state: State, values: dict[str, Any]) -> None:
    state.scale = values["scale"]
    if state.shape["attach"]:
        pointsman.set_loss_scale(state.stack, state.scale)


def functional(state: State, values: dict[str, Any]) -> None:
    """Other weights for one call."""
    state.stack.eval()
    hidden, mask, _ = made(state, values)
    other = {name: p.detach() * values["factor"] for name, p in state.stack.named_parameters()}
    with torch.no_grad():
        output, chosen = routed(
            state.stack, lambda: functional_call(state.stack, other, (hidden, RoutingContext(padding_mask=mask)))
        )
    exact = {**state.values(), **{name: value.double() for name, value in other.items()}}
    wanted, _ = state.expected(hidden.double(), mask, chosen, exact)
    compare(state.dtype, {"output": output}, {"output": wanted}, "the")


def materialize(state: State, values: dict[str, Any]) -> None:
    try:
        pointsman.materialize(state.stack)
    except ValueError:
        if not any(spec.startswith("xmoe") for spec in state.specs):
            raise
        return
    state.specs = [layer.router.spec for layer in state.stack]
    names = {name for name, _ in state.stack.named_parameters()}
    state.grads = {name: value for name, value in state.grads.items() if name in names}


STEPS: dict[str, Callable[[State, dict[str, Any]], State | None]] = {
    "build": lambda state, values: State(values), "train": train, "step": step, "evaluate": evaluate,
    "threads": threads, "k": set_k, "inner_k": inner_k, "dtype": cast, "copy": duplicate, "reload": reload,
    "freeze": freeze, "write": write, "scale": scale, "functional": functional, "materialize": materialize,
}  # fmt: skip
