"""What the ranks of the tests do: python worker.py FUNCTION RANK COUNT STORE ARGUMENTS (JSON), prints JSON."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pointsman import MoE, record_routing, replay_routing, set_top_k, step_end
from pointsman._errors import RunError, Stopped
from pointsman.control import named_routers, set_loss_scale
from pointsman.diagnostics.monitor import RoutingMonitor
from pointsman.experts.modules import EXPERTS
from pointsman.lab.models.config import TransformerXLConfig
from pointsman.lab.models.transformer_xl import TransformerXL
from pointsman.lab.training import trainer
from pointsman.lab.training.config import RunConfig
from pointsman.lab.training.language_modelling import LanguageModelling
from pointsman.lab.training.objectives import objective_of
from pointsman.lab.training.state import seed_step
from pointsman.ops import kernels
from pointsman.ops.exchange import Exchange
from pointsman.parallel.layout import Layout
from pointsman.parallel.shard import clip_gradient, gradient_norm, parallelize, parameter_groups, whole_tensors
from pointsman.parallel.start import one_after_another, start
from pointsman.ranks import ALONE, Ranks
from pointsman.routing import Pairs, Routing

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


def train(model: TransformerXL, ranks: Ranks, *, sgd: bool = False, factor: float = 1.0) -> tuple[list[float], Any]:
    """A few steps; the losses of the whole batch, and the optimizer."""
    objective = objective_of(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = parameter_groups(parameters)
    optimizer = torch.optim.SGD(groups, lr=0.5) if sgd else torch.optim.Adam(groups, lr=3e-3, fused=True)
    set_loss_scale(model, 1 / objective.passes)
    memory, losses = None, []
    for step in range(STEPS):
        seed_step(0, step)
        inputs, targets = (tensor[ranks.rows(BATCH)] for tensor in batch(step))
        if not any(router.fixed_k for _, router in named_routers(model)):
            set_top_k(model, 1 + step % 2)
        optimizer.zero_grad(set_to_none=True)
        outcome = objective.run(model, inputs, targets, memory, LENGTH)
        (factor * outcome.loss / ranks.count).backward()
        memory = outcome.memory
        losses.append(float(ranks.total(outcome.nats / ranks.count)[0]))
        clip_gradient(parameters, gradient_norm(parameters, ranks), 1.0)
        optimizer.step()
        step_end(model)
    return losses, optimizer


def invariant(
    ranks: Ranks, specs: list[str], layout: str = "", experts: str = "ffn", checkpointing: bool = False,
    sgd: bool = False, factor: float = 1.0, changes: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """spec -> the largest differences of loss and of any tensor to one process with the whole batch."""
    found = {}
    for spec in specs:
        with kernels.using(kernels.Kernels("plain")):
            alone = build(spec, experts, checkpointing, **(changes or {}))
            expected, _ = train(alone, ALONE, sgd=sgd)
            model = build(spec, experts, checkpointing, **(changes or {}))
            parallelize(model, Layout.parse(layout, ranks.count), ranks)
            losses, _ = train(model, ranks, sgd=sgd, factor=factor)
        state = whole_tensors(model)
        worst = max(
            float((state[name].double() - tensor.double()).abs().max())
            for name, tensor in alone.state_dict().items()
            if tensor.numel()
        )
        found[spec] = [max(abs(a - b) for a, b in zip(losses, expected, strict=True)), worst]
    return found


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
            routing = replace(routing, flat=Pairs(pairs.token, pairs.expert, pairs.weight, pairs.offsets))
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
        objective.run(model, inputs, targets, None, LENGTH).loss.backward()
        missing += [
            f"{spec}: {name}" for name, one in model.named_parameters() if one.requires_grad and one.grad is None
        ]
    return missing


class Block(nn.Module):
    """A block of somebody else's model."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(dim), MoE(dim, 24, 4, router="hyperrouter:balance=0.05", top_k=2)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.moe(self.norm(hidden))


class Foreign(nn.Module):
    """Somebody else's model."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim), Block(dim)])
        self.head = nn.Linear(dim, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def own_model(ranks: Ranks, layout: str, accelerate: bool = False) -> float:
    """A plain training loop around somebody else's model, or accelerate's: the largest difference of the weights."""

    def loop(model: Foreign, ranks: Ranks) -> Foreign:
        parameters = list(model.parameters())
        optimizer: Any = torch.optim.AdamW(parameter_groups(parameters), lr=1e-2)
        backward: Any = torch.Tensor.backward
        if accelerate and ranks.count > 1:
            optimizer, backward = accelerated(optimizer, ranks)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(4, 6, 16, generator=generator, dtype=torch.float64)[ranks.rows(4)]
            targets = torch.randint(5, (4, 6), generator=generator)[ranks.rows(4)]
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / ranks.count
            backward(loss)
            clip_gradient(parameters, gradient_norm(parameters, ranks), 1.0)
            optimizer.step()
            step_end(model)
            optimizer.zero_grad()
        return model

    def fresh() -> Foreign:
        torch.manual_seed(1)
        return Foreign().double()

    alone = loop(fresh(), ALONE).state_dict()
    state = whole_tensors(loop(parallelize(fresh(), Layout.parse(layout, ranks.count), ranks), ranks))
    return max(float((state[name].double() - tensor.double()).abs().max()) for name, tensor in alone.items())


def accelerated(optimizer: Any, ranks: Ranks) -> tuple[Any, Any]:
    """An optimizer prepared by accelerate, and its backward; the model is `parallelize`'s."""
    import os

    from accelerate import Accelerator

    os.environ |= {"RANK": str(ranks.rank), "LOCAL_RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # asked for; the ranks have met already
    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (ranks.rank, ranks.count)
    return accelerator.prepare(optimizer), accelerator.backward


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
            (model(inputs[rows], targets[rows]).loss / ranks.count).backward()
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
    return told


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
    """Language modelling in float64."""

    def build_model(self, config: RunConfig) -> Any:
        return super().build_model(config).double()


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
    ranks: Ranks, text: str, out: str, layout: str = "", resume: bool = False, stop: int = 0,
    spec: str = "smoe:balance=0.05", changes: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """A run of the lab in float64; what it raised."""
    config = run_config(text, spec, **(changes or {}))
    Watch.step, Watch.last = 0, stop if ranks.rank == ranks.count - 1 else 0  # of one rank
    try:
        trainer.train(
            config, out, resume=resume, task=Float64.open(config), monitor=Watch, stop=Watch, ranks=ranks,
            layout=Layout.parse(layout, ranks.count) if ranks.count > 1 else None,
        )  # fmt: skip
    except (RunError, Stopped) as error:
        return str(error)
    return ""


def masked(ranks: Ranks, texts: str, out: str, layout: str = "") -> str:
    """A run of masked language modelling in float64: rows with different numbers of targets, and padding."""
    from pointsman.lab.models.encoder import EncoderConfig
    from pointsman.lab.training.masked_language_modelling import MaskedLanguageModelling

    class Masked(MaskedLanguageModelling):
        def build_model(self, config: RunConfig) -> Any:
            return super().build_model(config).double()

    model = EncoderConfig(
        vocab_size=200, num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=24, num_experts=4,
        router="smoe:balance=0.05", moe_layers="after:1", norm="pre", dropout=0.1, expert_dropout=0.0,
        attention_dropout=0.0, max_length=32,
    )  # fmt: skip
    config = RunConfig(
        model=model, data=f"multilingual:{texts}", steps=4, batch_size=8, segment_length=32, memory_length=0,
        eval_batch_size=16, eval_tokens=512, valid_tokens=512, train_top_k="2", pieces=90, learning_rate=3e-3,
        validate_every=4, checkpoint_every=4, log_every=1, accumulation=2, mask_rate=0.02, deterministic=True,
    )  # fmt: skip
    task = one_after_another(ranks, lambda: Masked.open(config))
    divided = Layout.parse(layout, ranks.count) if ranks.count > 1 else None
    trainer.train(config, out, task=task, monitor=Watch, ranks=ranks, layout=divided)
    return ""


def full_disk(ranks: Ranks, text: str, out: str) -> str:
    """What a run says in which rank 1 can write no large file."""
    import resource

    Float64.open(run_config(text))  # its ids are in the cache then
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    return training(ranks, text, out)


def differing(ranks: Ranks, text: str, out: str) -> str:
    """What ranks with other settings say."""
    return training(ranks, text, out, changes={"learning_rate": 1e-3 * (1 + ranks.rank)})


def main() -> None:
    function, rank, count, store, arguments = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*the router gets no gradient")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .FSDPForeign. returned a view")  # an nn.Linear's
    ranks = start(rank=int(rank), count=int(count), store=Path(store), timeout=timedelta(seconds=60))
    try:
        result = globals()[function](ranks, **json.loads(arguments))
        print(json.dumps(result), flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        import os

        os._exit(1)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
