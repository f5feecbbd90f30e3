"""Every loop on the page "Your own training loop", run as it is printed, against a float64 loop that adds by hand."""

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pointsman
from pointsman import MoE, record_routing

PAGE = Path(__file__).parents[2] / "docs" / "own-training-loop.md"
LEARNING_RATE = 0.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = MoE(8, 16, 4, router="smoe:balance=0.3:z_loss=0.05")
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head((inputs + self.moe(inputs)).mean(-2))


def block(heading: str) -> str:
    """The code under a heading of the page."""
    found = re.search(rf"^## {heading}\n.*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert found, heading
    return found[1]


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(2, 5, 8, generator=draw), torch.randint(3, (2,), generator=draw)) for _ in range(4)]


def by_hand(accumulation: int) -> dict[str, Tensor]:
    """The weights after the four batches, in float64, with the routers' losses taken from the routing."""
    model = Model().double()
    live: list[Tensor] = []
    model.moe.router.register_forward_hook(lambda _, __, routing: live.extend(routing.losses.values()))
    model.moe.delivery.how = "leave"
    for index, (inputs, targets) in enumerate(batches(), 1):
        live.clear()
        loss = F.cross_entropy(model(inputs.double()), targets) + sum(live)
        (loss / accumulation).backward()
        if index % accumulation == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LEARNING_RATE * parameter.grad
                    parameter.grad = None
    return {name: value.float() for name, value in model.state_dict().items()}


def run(heading: str, accumulation: int, tolerance: float = 1e-5, **names: Any) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    data = batches()
    examples = [one for inputs, targets in data for one in zip(inputs, targets, strict=True)]
    loader = torch.utils.data.DataLoader(examples, 2)
    scope = {
        "pointsman": pointsman, "torch": torch, "model": model, "optimizer": optimizer, "criterion": F.cross_entropy,
        "batches": data, "loader": loader, "device": "cpu", **names,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other libraries; nothing of ours is looked for here
        exec(compile(block(heading), str(PAGE), "exec"), scope)
    for name, value in by_hand(accumulation).items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_the_losses_matter_here() -> None:
    model = Model()
    with record_routing(model) as records:
        model(batches()[0][0])
    assert all(value > 0.05 for value in records["moe"].losses.values())


@pytest.mark.parametrize(("heading", "accumulation"), [("Plain", 1), ("Gradient accumulation", 4)])
def test_plain_and_accumulation(heading: str, accumulation: int) -> None:
    run(heading, accumulation)


def test_grad_scaler() -> None:
    run("GradScaler", 1, tolerance=5e-3)  # float16 in the experts


def test_distributed_data_parallel(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        run("DistributedDataParallel", 1)
    finally:
        torch.distributed.destroy_process_group()


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    try:
        run("accelerate", 4)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


@pytest.mark.slow
def test_lightning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lightning")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "enable_model_summary": False, "default_root_dir": str(tmp_path), **quiet}
    run("Lightning", 4, options=options)


def test_lightning_goes_on_with_another_model_after_an_error() -> None:
    pytest.importorskip("lightning")
    from pointsman.engines.lightning import RoutingLog

    log, trainer = RoutingLog(every=1), SimpleNamespace(fit_loop=SimpleNamespace(total_batch_idx=0))
    for model in (Model(), Model()):
        model.log_dict = (logged := []).append  # type: ignore[assignment, var-annotated]
        log.on_train_batch_start(trainer, model)
        model(torch.randn(2, 5, 8))
        log.on_train_batch_end(trainer, model)
        assert logged
        log.on_exception(trainer, model, KeyboardInterrupt())


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    examples = [
        {"inputs": one, "labels": label}
        for inputs, targets in batches()
        for one, label in zip(inputs, targets, strict=True)
    ]
    options = {
        "num_train_epochs": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
        "max_grad_norm": 0.0, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    try:
        run("Trainer of transformers", 4, folder=str(tmp_path), examples=examples, options=options)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


def test_weight_decay_leaves_biases_norms_and_embeddings_out() -> None:
    layer = MoE(8, 16, 4, router="xmoe", shared_experts=1, gated=True, activation="silu")
    model = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.LayerNorm(8), layer, torch.nn.Linear(8, 5))
    pointsman.freeze(model, "router")
    decayed, others = pointsman.param_groups(model, weight_decay=0.3)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(one)] for one in decayed["params"]}
    assert {"2.experts.w_in", "2.experts.w_gate", "2.experts.w_out", "3.weight"} <= found
    assert not [name for name in found if "b_" in name or "bias" in name or name[0] in "01"]
    assert found | {names[id(one)] for one in others["params"]} == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    with pytest.raises(ValueError, match="weight_decay=nan: allowed are numbers from 0"):
        pointsman.param_groups(model, weight_decay=float("nan"))


def test_a_router_that_is_none_is_told_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^router=Linear\(…\): allowed are a spec and a pointsman.Router; 'smoe' is"):
        MoE(8, 16, 4, router=torch.nn.Linear(8, 4))  # type: ignore[arg-type]


def test_the_loop_of_many_processes_on_one() -> None:
    page = PAGE.with_name("scale.md").read_text(encoding="utf-8")
    loop = re.findall(r"^## In your own training loop\n.*?```python\n(.*?)```", page, re.M | re.S)[0]
    scope: dict[str, Any] = {"torch": torch, "cross_entropy": F.cross_entropy, "batches": batches(), "model": Model()}
    exec(compile(loop.replace('"cuda"', '"cpu"').replace("experts=4", ""), str(PAGE), "exec"), scope)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for inputs, targets in batches():
        pointsman.add_losses(F.cross_entropy(model(inputs), targets), model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(scope["model"].state_dict()[name], value, msg=name)
