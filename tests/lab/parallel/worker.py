"""What the ranks of the tests do: python worker.py RANK COUNT STORE, then lines [FUNCTION, ARGUMENTS] in JSON."""

import copy
import json
import math
import os
import sys
import traceback
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pointsman import MoE, record_routing, replay_routing, set_top_k, step_end
from pointsman._errors import RunError, Stopped
from pointsman.control import named_routers
from pointsman.delivery import add_losses, deliveries, set_loss_scale
from pointsman.diagnostics.monitor import RoutingMonitor
from pointsman.experts.combine import PerPair
from pointsman.experts.modules import EXPERTS
from pointsman.ops import kernels
from pointsman.ops.exchange import Exchange, local_part
from pointsman.parallel import STORE
from pointsman.parallel.layout import Layout
from pointsman.parallel.shard import clip_gradient, gradient_norm, parallelize, parameter_groups, whole_tensors
from pointsman.parallel.start import start
from pointsman.ranks import ALONE, Ranks
from pointsman.routing import Pairs, Routing
from pointsman_lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from pointsman_lab.processes import one_after_another
from pointsman_lab.tasks.language_modelling.task import LanguageModelling
from pointsman_lab.training import trainer
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.kernels import seed_step
from pointsman_lab.training.objectives import objective_of

BATCH, LENGTH, STEPS, EXPERT_COUNT = 8, 12, 4, 4


def build(spec: str, experts: str = "ffn", checkpointing: bool = False, **changes: Any) -> TransformerXL:
    torch.manual_seed(0)
    config = TransformerXLConfig(
        vocab_size=64, num_layers=2, dim=32, num_heads=2, head_dim=16, hidden_dim=32, num_experts=EXPERT_COUNT,
        router=spec, dropout=0.0, pre_norm=True, init_std=0.1, experts=experts, allow_non_causal=True, top_k=2,
        checkpoint_activations=checkpointing, moe_layers="after:1" if experts == "base" else "all",
    )  # fmt: skip
    return TransformerXL(replace(config, **changes)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(model: TransformerXL, ranks: Ranks, *, sgd: bool = False, factor: float = 1.0) -> dict[str, Tensor]:
    """A few steps: the losses of the whole batch, the norms of its gradients, and what they leave in weights, routers
    and optimizer, of which each rank has its part."""
    objective = objective_of(model)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = parameter_groups(named.values())
    optimizer = torch.optim.SGD(groups, lr=0.5) if sgd else torch.optim.Adam(groups, lr=3e-3, fused=True)
    memory, found = None, {}
    for step in range(STEPS):
        seed_step(0, step)
        inputs, targets = (tensor[ranks.rows(BATCH)] for tensor in batch(step))
        if not any(router.fixed_k for _, router in named_routers(model)):
            set_top_k(model, 1 + step % 2)
        optimizer.zero_grad(set_to_none=True)
        outcome = objective.run(model, inputs, targets, memory, LENGTH)
        own = [one for each in deliveries(model).values() for one in each.take()]
        (factor * outcome.loss / ranks.count + sum(own) / objective.passes).backward()
        memory = outcome.memory
        norm = gradient_norm(named.values(), ranks)
        found |= {f"loss of step {step}": ranks.total(outcome.nats / ranks.count)[0], f"norm of step {step}": norm}
        clip_gradient(named.values(), norm, 1.0)
        optimizer.step()
        step_end(model, None if ranks.count > 1 else lambda tensors: None)  # one process among others
    for name, parameter in named.items():
        found |= {f"{key} of {name}": value for key, value in optimizer.state[parameter].items()}
    return {name: tensor.detach() for name, tensor in (found | model.state_dict()).items()}


def distance(part: Tensor, expected: Tensor) -> float:
    """The largest difference of a rank's part of a tensor from that part of the whole."""
    expected = expected.view(part.shape)
    if isinstance(part, DTensor):
        expected = distribute_tensor(expected, part.device_mesh, part.placements, src_data_rank=None).to_local()
        part = part.to_local()
    return float((part.double() - expected.double()).abs().max()) if part.numel() else 0.0


def invariant(
    ranks: Ranks, specs: list[str], layouts: list[str], experts: str = "ffn", checkpointing: bool = False,
    sgd: bool = False, factor: float = 1.0, changes: dict[str, Any] | None = None,
) -> dict[str, tuple[float, str]]:  # fmt: skip
    """Spec and layout -> the largest difference to one process with the whole batch, and of what.

    The one process checkpoints no activations. Each rank is the one process for some of the specs. Rank 0 alone draws
    the weights.
    """
    found = {}

    def run(spec: str, layout: str | None) -> dict[str, Tensor]:
        with kernels.using(kernels.Kernels("plain")):
            with on_first(ranks if layout is not None else ALONE):
                model = build(spec, experts, checkpointing and layout is not None, **(changes or {}))
            if layout is None:
                return train(model, ALONE, sgd=sgd)
            parallelize(model, Layout.parse(layout, ranks.count), ranks)
            return train(model, ranks, sgd=sgd, factor=factor)

    for first in range(0, len(specs), ranks.count):
        some = specs[first : first + ranks.count]
        references = ranks.gather(run(some[ranks.rank], None) if ranks.rank < len(some) else {})
        for spec, reference in zip(some, references, strict=False):
            for layout in layouts:
                over = run(spec, layout)
                assert over.keys() == reference.keys()
                differences = {name: distance(over[name], tensor) for name, tensor in reference.items()}
                worst = max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))
                found[f"{spec} {layout}"] = (differences[worst], worst)
    return found


def on_first(ranks: Ranks) -> Any:
    """Where a model is built that rank 0 alone gives weights."""
    return nullcontext() if ranks.first else torch.device("meta")


class Live(TorchDispatchMode):
    """Bytes of the tensors that are made inside and alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[int, Any]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and not tensor.is_meta and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = storage.nbytes(), weakref.ref(storage, lambda _, key=key: self.alive.pop(key))
        self.most = max(self.most, sum(size for size, _ in self.alive.values()))
        return found


def placed(ranks: Ranks, layout: str) -> dict[str, Any]:
    """A model whose weights rank 0 alone draws, against one that every rank draws.

    Returns:
        Of both: the most bytes of tensors alive until it is divided, over those of the whole model. Whether four steps
        leave the same bits, whether shared weights stay shared, and whether experts that are gathered in bfloat16 leave
        the bits of those that are not.
    """

    def fresh(by_first: bool, gather: torch.dtype | None = None) -> tuple[TransformerXL, float]:
        with Live() as live:
            with on_first(ranks) if by_first else nullcontext():
                model = build("hyperrouter:share=true:balance=0.05+similarity", num_layers=6, hidden_dim=256).float()
                model.layers[0].twin, model.layers[5].twin = (nn.Linear(4, 4) for _ in range(2))
                model.layers[5].twin.weight = model.layers[0].twin.weight
            size = sum(one.nbytes for one in {*model.parameters(), *model.buffers()})
            parallelize(model, Layout.parse(layout, ranks.count), ranks, gather=gather)
        return model, live.most / size

    def bits(model: TransformerXL) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return {name: local_part(tensor) for name, tensor in train(model, ranks).items()}

    (every, all_whole), (first, one_whole) = fresh(False), fresh(True)
    shared = first.layers[5].twin.weight is first.layers[0].twin.weight
    expected, found, half = bits(every), bits(first), bits(fresh(True, torch.bfloat16)[0])
    same = [all(torch.equal(one[name], tensor) for name, tensor in expected.items()) for one in (found, half)]
    return {"most": [all_whole, one_whole], "same": same[0], "shared": shared, "half": same[1]}


def exchange(ranks: Ranks) -> dict[str, Any]:
    """The worst difference of outputs and gradients over a table of routings, and rows sent over assignments."""
    from torch.distributed import group

    worst, sent, assigned, far = 0.0, 0, 0, 0.0
    for kind in ("ffn", "base"):
        for gated in (False, True):
            for k in (1, 2, 5, 8):
                for case in ("random", "first", "padded", "none", "flat"):
                    difference, rows, pairs, expected = one_exchange(ranks, group.WORLD, kind, gated, k, case)
                    worst = max(worst, difference)
                    if case == "random":
                        sent, assigned, far = sent + rows, assigned + pairs, far + expected
    return {"worst": worst, "sent": sent, "assigned": assigned, "expected": far}


def one_exchange(
    ranks: Ranks, group: Any, kind: str, gated: bool, k: int, case: str
) -> tuple[float, int, int, float]:  # fmt: skip
    count, dim, hidden_dim = 8, 16, 24
    generator = torch.Generator().manual_seed(k)
    torch.manual_seed(0)
    whole = EXPERTS[kind](dim, hidden_dim, count, gated=gated, activation="silu").double()
    part = EXPERTS[kind](dim, hidden_dim, count, gated=gated, activation="silu").double()
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    part.load_state_dict(whole.state_dict())
    sizes = [5, 0, 7, 3][: ranks.count]  # the second rank has no token
    total, begin = sum(sizes), sum(sizes[: ranks.rank])
    own = slice(begin, begin + sizes[ranks.rank])
    experts = torch.stack([torch.randperm(count, generator=generator)[:k] for _ in range(total)])
    if case == "first":
        experts = torch.arange(k).expand(total, k).clone()
    if case == "padded":
        experts[torch.rand(total, k, generator=generator) < 0.4] = -1
    if case == "none":
        experts.fill_(-1)
    weights = torch.rand(total, k, generator=generator, dtype=torch.float64).masked_fill(experts < 0, 0)
    inputs = torch.randn(total, dim, generator=generator, dtype=torch.float64)
    cotangent = torch.randn(total, dim, generator=generator, dtype=torch.float64)
    local = count // ranks.count
    here = slice(ranks.rank * local, (ranks.rank + 1) * local)
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach()[here].clone()))
    part.exchange = Exchange(group, count)

    def run(layer: Any, rows: slice) -> list[Tensor]:
        x, w = inputs[rows].clone().requires_grad_(), weights[rows].clone().requires_grad_()
        probs = torch.zeros(1, 1, dtype=torch.float64).expand(len(x), count)
        routing = Routing(experts[rows], w, probs, probs)
        if case == "flat":
            pairs = routing.pairs
            flat = Pairs(pairs.token, pairs.expert, pairs.weight, pairs.offsets)
            routing = replace(routing, how=PerPair(flat=flat))
        output = layer(x, routing)
        (output * cotangent[rows]).sum().backward()
        assert x.grad is not None
        grad = torch.zeros_like(w) if w.grad is None else w.grad
        return [output.detach(), x.grad, grad.masked_fill(experts[rows] < 0, 0)]

    expected = [tensor[own] for tensor in run(whole, slice(None))]
    found = run(part, own)
    differences = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True) if a.numel()]
    for (_, mine), (_, every) in zip(part.named_parameters(), whole.named_parameters(), strict=True):
        assert mine.grad is not None, "a parameter without a gradient"
        grad = torch.zeros_like(every) if every.grad is None else every.grad
        differences.append(float((mine.grad - grad[here]).abs().max()))
    visited = sum(len(set((row // local).tolist())) for row in experts[own])
    return max(differences), part.exchange.sent, sizes[ranks.rank] * k, visited


def every_gradient(ranks: Ranks, specs: list[str]) -> list[str]:
    """Parameters without a gradient on this rank after one backward."""
    missing = []
    for spec in specs:
        model = build(spec)
        objective = objective_of(model)
        inputs, targets = (tensor[ranks.rows(BATCH)] for tensor in batch(0))
        add_losses(objective.run(model, inputs, targets, None, LENGTH).loss, model).backward()
        missing += [
            f"{spec}: {name}" for name, one in model.named_parameters() if one.requires_grad and one.grad is None
        ]
    return missing


class Block(nn.Module):
    """A block of somebody else's model."""

    def __init__(self, dim: int, attach: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.moe = MoE(dim, 24, 4, router="hyperrouter:balance=0.05", top_k=2, attach_losses=attach)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.moe(self.norm(hidden))


class Foreign(nn.Module):
    """Somebody else's model."""

    def __init__(self, dim: int = 16, attach: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, attach), Block(dim, attach)])
        self.bare = nn.ModuleList([Block(dim, attach).moe])  # runs in no block
        self.head = nn.Linear(dim, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + self.bare[0](hidden))


def own_batches() -> list[tuple[Tensor, Tensor]]:
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, 6, 16, generator=generator, dtype=torch.float64)
        found.append((inputs, torch.randint(5, (4, 6), generator=generator)))
    return found


def own_loss(model: nn.Module, inputs: Tensor, targets: Tensor, ranks: Ranks) -> Tensor:
    rows = ranks.rows(len(inputs))
    loss = nn.functional.cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten())
    if any(one.how == "attach" for one in deliveries(model).values()):
        return loss / ranks.count
    return add_losses(loss, model, ranks)


def own_model(ranks: Ranks, layout: str, through: str = "") -> float:
    """A plain training loop around somebody else's model, with attached losses or `add_losses`, accelerate's, or
    Lightning's: the largest difference of the weights."""

    def loop(model: Foreign, ranks: Ranks, through: str = "") -> Foreign:
        if "lightning" in through:
            return by_lightning(model, ranks)
        parameters = list(model.parameters())
        optimizer: Any = torch.optim.AdamW(parameter_groups(parameters), lr=1e-2)
        backward: Any = torch.Tensor.backward
        if "accelerate" in through:
            optimizer, backward = accelerated(optimizer, ranks)
        for inputs, targets in own_batches():
            backward(own_loss(model, inputs, targets, ranks))
            clip_gradient(parameters, gradient_norm(parameters, ranks), 1.0)
            optimizer.step()
            step_end(model)
            optimizer.zero_grad()
        return model

    def fresh() -> Foreign:
        torch.manual_seed(1)
        return Foreign(attach="add_losses" not in through).double()

    alone = loop(fresh(), ALONE).state_dict()
    divided = parallelize(fresh(), Layout.parse(layout, ranks.count), ranks)
    state = whole_tensors(loop(divided, ranks, through))  # type: ignore[arg-type]
    return max(float((state[name].double() - tensor.double()).abs().max()) for name, tensor in alone.items())


def as_by_torchrun(ranks: Ranks) -> None:
    """What accelerate and Lightning ask the environment for; the ranks have met already."""
    os.environ |= {"RANK": str(ranks.rank), "LOCAL_RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks.count)}


def accelerated(optimizer: Any, ranks: Ranks) -> tuple[Any, Any]:
    """An optimizer prepared by accelerate, and its backward; the model is `parallelize`'s."""
    from accelerate import Accelerator

    as_by_torchrun(ranks)
    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (ranks.rank, ranks.count)
    return accelerator.prepare(optimizer), accelerator.backward


def by_lightning(model: Foreign, ranks: Ranks) -> Foreign:
    """Trained by Lightning's loop, which takes the model of each rank for one of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning
        from lightning.pytorch.strategies import SingleDeviceStrategy

    class Learner(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return own_loss(self.model, *batch, ranks)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(parameter_groups(self.model.parameters()), lr=1e-2)

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            parameters = list(self.model.parameters())
            clip_gradient(parameters, gradient_norm(parameters, ranks), 1.0)

        def on_train_batch_end(self, *_: Any) -> None:
            step_end(self.model)

    as_by_torchrun(ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu", strategy=SingleDeviceStrategy(torch.device("cpu")), max_epochs=1, logger=False,
            use_distributed_sampler=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Learner(), torch.utils.data.DataLoader(own_batches(), batch_size=None))  # type: ignore[arg-type]
    return model


def replayed(ranks: Ranks, layout: str) -> float:
    """A routing recorded by one process and replayed on each rank's rows, with other weights: the largest difference
    of a gradient."""

    def fresh() -> TransformerXL:
        model = build("smoe:balance=0.05")
        for _, router in named_routers(model):
            nn.init.normal_(router.score.weight)
        return model

    def gradients(model: TransformerXL, records: Any, ranks: Ranks) -> dict[str, Tensor]:
        rows = ranks.rows(BATCH)
        own = {name: one.experts.unflatten(0, (BATCH, LENGTH))[rows].flatten(0, 1) for name, one in records.items()}
        inputs, targets = batch(1)
        with replay_routing(model, own):
            add_losses(model(inputs[rows], targets[rows]).loss, model, ranks).backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in found.items()}

    recorder = build("smoe:balance=0.05")
    with torch.no_grad(), record_routing(recorder) as records:
        recorder(batch(1)[0])
    expected = gradients(fresh(), records, ALONE)
    found = gradients(parallelize(fresh(), Layout.parse(layout, ranks.count), ranks), records, ranks)
    live = fresh()
    with torch.no_grad(), record_routing(live) as other:
        live(batch(1)[0])
    assert any(not torch.equal(one.experts, records[name].experts) for name, one in other.items())
    return max(float((found[name] - grad).abs().max()) for name, grad in expected.items())


def refused(ranks: Ranks) -> list[str]:
    """What `parallelize` says of mistakes."""
    told = []

    def attempt(layout: Layout, model: nn.Module) -> None:
        try:
            parallelize(model, layout, ranks)
        except ValueError as error:
            told.append(str(error))

    attempt(Layout(4), build("smoe"))
    torch.manual_seed(ranks.rank)
    attempt(Layout(ranks.count), Foreign())
    attempt(Layout(ranks.count, experts=2), nn.Sequential(MoE(8, 8, 3)))
    attempt(Layout(ranks.count), nn.Sequential(MoE(8, 8, 4, router="compete")))
    torch.manual_seed(1)
    undivided = Foreign(attach=False)
    for model, given in (
        (parallelize(copy.deepcopy(undivided), Layout(ranks.count), ranks), ALONE),
        (undivided, ranks),
    ):
        try:
            add_losses(model(torch.ones(1, 2, 16)).sum(), model, given)
        except ValueError as error:
            told.append(str(error))
    return told


def differing_steps(ranks: Ranks) -> dict[str, str]:
    """What ranks say that differ at the first step: what is wrong -> the error, "" = it is right."""

    def step(spec: str, *rows: int, k: int = 2, scale: float = 1.0, half: bool = False) -> str:
        torch.manual_seed(0)
        model = parallelize(
            nn.Sequential(MoE(8, 8, 4, router=spec, attach_losses=True), nn.Tanh()), Layout(ranks.count), ranks
        )
        set_top_k(model, k)
        set_loss_scale(model, scale)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                for count in rows:
                    model(torch.randn(count, 6, 8)).float().sum().backward()
        except RunError as error:
            return str(error)
        return ""

    rank = ranks.rank
    unequal = {spec: step(spec, 3 + rank) for spec in ("smoe:balance=0.1", *NEED_EQUAL_ROWS)}
    unequal |= {f"{spec} later": step(spec, 3, 4, 3 + rank) for spec in ("smoe:balance=0.1", *NEED_EQUAL_ROWS)}
    others = {"k": step("smoe", 3, k=1 + rank), "loss_scale": step("smoe", 3, scale=1 + rank)}
    return {**unequal, **others, "autocast": step("smoe", 3, half=rank == 1)}


NEED_EQUAL_ROWS = ("vmoe", "noisy-topk", "base", "sinkhorn", "expert-choice:group=batch")


def half_exchange(ranks: Ranks) -> dict[str, Any]:
    """Under autocast: the dtypes of what travels, and the worst difference to experts in one process."""
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed import group

    def experts() -> Any:
        torch.manual_seed(0)
        return EXPERTS["ffn"](16, 24, 4)

    torch.manual_seed(1)
    inputs, routed = torch.randn(2 * ranks.count, 16), torch.tensor([[0, 2], [3, 1]]).repeat(ranks.count, 1)
    weights = torch.rand(2 * ranks.count, 2)
    whole, part = experts(), experts()
    local = 4 // ranks.count
    for name, parameter in list(part.named_parameters()):
        setattr(part, name, nn.Parameter(parameter.detach()[ranks.rank * local : (ranks.rank + 1) * local].clone()))
    part.exchange = Exchange(group.WORLD, 4)
    travelled: list[str] = []
    send = collectives.all_to_all_single_autograd

    def noted(rows: Tensor, *arguments: Any) -> Tensor:
        travelled.append(str(rows.dtype))
        return send(rows, *arguments)

    def run(layer: Any, own: slice) -> list[Tensor]:
        rows = inputs[own].clone().requires_grad_()
        probs = torch.zeros(1, 1).expand(len(rows), 4)
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(rows, Routing(routed[own], weights[own], probs, probs))
        output.float().sum().backward()
        assert rows.grad is not None
        return [output.detach().float(), rows.grad]

    collectives.all_to_all_single_autograd = noted
    try:
        found = run(part, ranks.rows(len(inputs)))
    finally:
        collectives.all_to_all_single_autograd = send
    expected = [tensor[ranks.rows(len(inputs))] for tensor in run(whole, slice(None))]
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return {"travelled": travelled, "worst": worst}


def recorded(ranks: Ranks) -> bool:
    """Whether a sharded layer in evaluation gives what one process gives on these rows."""
    alone = build("smoe").eval()
    model = parallelize(build("smoe"), Layout(ranks.count), ranks).eval()
    inputs, _ = batch(0)
    rows = ranks.rows(BATCH)
    with torch.no_grad(), record_routing(model) as records:
        logits = model(inputs[rows]).logits
        expected = alone(inputs).logits[rows]
    assert set(records) == {"layers.0.moe", "layers.1.moe"}
    return bool((logits - expected).abs().max() < 1e-12)


class Float64(LanguageModelling):
    """Language modelling in float64; from a step on, a layer or (below zero) what flows back into it is no number."""

    broken = 0

    def build_model(self, config: RunConfig) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            if output.requires_grad and Watch.step >= -Float64.broken > 0:
                output.register_hook(lambda gradient: gradient * math.nan)
            return output * math.nan if Watch.step >= Float64.broken > 0 else output

        model = super().build_model(config).double()
        model.layers[1].moe.experts.register_forward_hook(hook)
        return model


class Watch(RoutingMonitor):
    """A monitor that is a stop as well, from a step on."""

    step, last = 0, 0

    def observe(self, step: int) -> Any:
        Watch.step = step
        return super().observe(step)

    @classmethod
    def is_set(cls) -> bool:
        return cls.step >= cls.last > 0


def run_config(text: str, spec: str = "smoe:balance=0.05", **changes: Any) -> RunConfig:
    model = TransformerXLConfig(
        64, num_layers=2, dim=32, num_heads=2, head_dim=16, hidden_dim=32, num_experts=4, router=spec, dropout=0.0
    )
    config = RunConfig(
        model=model, data=text, steps=6, batch_size=8, accumulation=2, segment_length=8, memory_length=8,
        eval_batch_size=3, eval_segment_length=8, eval_memory_length=8, eval_tokens=200, valid_tokens=100,
        learning_rate=3e-3, validate_every=3, checkpoint_every=2, observe_every=2, log_every=1, deterministic=True,
    )  # fmt: skip
    return config.with_overrides(changes)


def training(
    ranks: Ranks, text: str, out: str, layout: str = "", resume: bool = False, stop: int = 0, broken: int = 0,
    spec: str = "smoe:balance=0.05", changes: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """A run of the lab in float64; what it raised. The last rank is asked to stop, or breaks."""
    config = run_config(text, spec, **(changes or {}))
    last = ranks.rank == ranks.count - 1
    Watch.step, Watch.last, Float64.broken = 0, stop * last, broken * last
    divided = Layout.parse(layout, ranks.count) if ranks.count > 1 else None
    try:
        with mock.patch.object(trainer, "RoutingMonitor", Watch):
            trainer.train(
                config, out, resume=resume, task=Float64.open(config), stop=Watch, ranks=ranks, layout=divided
            )
    except (RunError, Stopped) as error:
        return str(error)
    return ""


def masked(ranks: Ranks, texts: str, out: str, layout: str = "") -> str:
    """A run of masked language modelling in float64: rows with different numbers of targets, and padding."""
    from pointsman_lab.models.encoder import EncoderConfig
    from pointsman_lab.tasks.masked_language_modelling.task import MaskedLanguageModelling

    class Masked(MaskedLanguageModelling):
        def build_model(self, config: RunConfig) -> Any:
            return super().build_model(config).double()

    model = EncoderConfig(
        vocab_size=200, num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=24, num_experts=4,
        router="smoe:balance=0.05", moe_layers="after:1", norm="pre", dropout=0.1, attention_dropout=0.1,
        expert_dropout=0.0, max_length=32,
    )  # fmt: skip
    config = RunConfig.of(
        model=model, data=f"multilingual:{texts}", steps=4, batch_size=8, segment_length=32, memory_length=0,
        eval_batch_size=16, eval_tokens=512, valid_tokens=512, train_top_k="2", pieces=90, learning_rate=3e-3,
        validate_every=4, checkpoint_every=4, log_every=1, accumulation=2, mask_rate=0.02, deterministic=True,
    )  # fmt: skip
    task = one_after_another(ranks, lambda: Masked.open(config))
    divided = Layout.parse(layout, ranks.count) if ranks.count > 1 else None
    trainer.train(config, out, task=task, ranks=ranks, layout=divided)
    return ""


def translated(ranks: Ranks, texts: str, out: str, layout: str = "") -> str:
    """A run of translation in float64: every rank evaluates all sentences."""
    from pointsman_lab.tasks.translation.model import TranslationConfig
    from pointsman_lab.tasks.translation.task import Translation

    class Exact(Translation):
        def build_model(self, config: RunConfig) -> Any:
            return super().build_model(config).double()

    model = TranslationConfig(
        vocab_size=100, num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=24, num_experts=4,
        router="switch:balance=0.05", dropout=0.1, attention_dropout=0.1, expert_dropout=0.0, max_length=24,
    )  # fmt: skip
    config = RunConfig.of(
        model=model, data=f"parallel:{texts}:from=de:to=en", steps=4, batch_size=8, segment_length=24, memory_length=0,
        eval_batch_size=8, train_top_k="1", pieces=50, learning_rate=3e-3, label_smoothing=0.1, accumulation=2,
        validate_every=4, checkpoint_every=4, log_every=1, eval_top_k=(1, 4), beam=2, valid_tokens=80,
        deterministic=True,
    )  # fmt: skip
    task = one_after_another(ranks, lambda: Exact.open(config))
    divided = Layout.parse(layout, ranks.count) if ranks.count > 1 else None
    trainer.train(config, out, task=task, ranks=ranks, layout=divided)
    return ""


def pictured(ranks: Ranks, folder: str, out: str, layout: str = "") -> str:
    """A run of image classification in float64, with drawn crops, mixtures and noise."""
    from pointsman_lab.tasks.images.task import ImageClassification
    from pointsman_lab.tasks.images.vit import VisionTransformerConfig

    class Exact(ImageClassification):
        def build_model(self, config: RunConfig) -> Any:
            model = super().build_model(config).double()
            model.embedding.register_forward_pre_hook(lambda module, images: (images[0].double(),))
            return model

    model = VisionTransformerConfig(
        num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=16, num_experts=4, patch=4, router="vmoe",
        moe_layers="last:1", pooling="mean", init_std=0.1, dropout=0.1, attention_dropout=0.1, expert_dropout=0.0,
    )  # fmt: skip
    config = RunConfig.of(
        model=model, data=folder, steps=4, batch_size=8, eval_batch_size=7, augment="crop=1+flip+mixup=0.2",
        label_smoothing=0.1, train_top_k="2", learning_rate=3e-3, validate_every=4, checkpoint_every=4, log_every=1,
        accumulation=2, deterministic=True,
    )  # fmt: skip
    task = one_after_another(ranks, lambda: Exact.open(config))
    divided = Layout.parse(layout, ranks.count) if ranks.count > 1 else None
    trainer.train(config, out, task=task, ranks=ranks, layout=divided)
    return ""


def full_disk(ranks: Ranks, text: str, out: str) -> str:
    """What a run says in which rank 1 can write no large file."""
    import resource

    Float64.open(run_config(text))  # its ids are in the cache then
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        return training(ranks, text, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def differing(ranks: Ranks, text: str, out: str) -> str:
    """What ranks with other settings say."""
    return training(ranks, text, out, changes={"learning_rate": 1e-3 * (1 + ranks.rank)})


def main() -> None:
    rank, count, store = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*the router gets no gradient")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .FSDPForeign. returned a view")  # an nn.Linear's
    os.environ |= {"RANK": rank, "WORLD_SIZE": count, STORE: store}
    ranks = start(timeout=timedelta(seconds=200))
    for line in sys.stdin:
        function, arguments = json.loads(line)
        try:
            print("result:", json.dumps(globals()[function](ranks, **arguments)), flush=True)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


if __name__ == "__main__":
    main()
