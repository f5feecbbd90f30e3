"""Hugging Face models on a CUDA device: our experts, logs of routings, other routers, balance."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import pointsman.hf as hf
from pointsman import record_routing, step_end
from pointsman.ops.kernels import Kernels, using
from pointsman.traces import RoutingTrace
from pointsman_lab.checkpoints import audit
from tests.library.hf import zoo

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CLASSES = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "dots1", "glm4_moe")
IDS = torch.randint(0, 96, (3, 24), generator=torch.Generator().manual_seed(0))


def stepped(model: Any) -> list[torch.Tensor]:
    ids = IDS.to(model.device)
    output = model(ids)
    loss = output.logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    model.zero_grad()
    loss.backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return [one.detach().double().cpu() for one in (output.logits, *gradients)]


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_our_experts_are_as_exact_as_the_models_own(name: str, dtype: torch.dtype, way: str) -> None:
    exact, model = zoo.tiny_model(name).double(), zoo.tiny_model(name).to(DEVICE, dtype)
    for one in (exact, model):
        one.set_experts_implementation("eager")
    expected_all, own = stepped(exact), stepped(model)
    model.set_experts_implementation("pointsman")
    with using(Kernels(gpu=way)):
        found = stepped(model)
    part = 1e-4 if dtype == torch.float32 else 2e-2
    for one, other, expected in zip(found, own, expected_all, strict=True):
        size = float(expected.norm())
        assert float((one - expected).norm()) <= 1.5 * float((other - expected).norm()) + part * size + 1e-6
    with torch.no_grad():
        assert model.generate(IDS[:, :5].to(DEVICE), max_new_tokens=4, do_sample=False).shape == (3, 9)


@pytest.mark.parametrize("how", ["loss", "bias"])
@pytest.mark.parametrize("name", CLASSES)
def test_balance(name: str, how: str) -> None:
    figures = {}
    for device in ("cpu", DEVICE):
        model = zoo.tiny_model(name).to(device).train()
        hf.balance(model, 0.1 if how == "loss" else 0.001, how=how)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        loss = model(IDS.to(device), labels=IDS.to(device)).loss
        loss.backward()
        optimizer.step()
        figures[device] = loss.detach().cpu()
    torch.testing.assert_close(figures[DEVICE], figures["cpu"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CLASSES)
def test_a_recorded_routing_is_replayed(name: str, tmp_path: Path) -> None:
    model = zoo.tiny_model(name).to(DEVICE)
    ids = IDS.to(DEVICE)
    with torch.no_grad():
        with record_routing(model) as records:
            expected = model(ids).logits
        records.save(tmp_path / "trace.safetensors", ids, logits=True)
        with hf.replay(model, RoutingTrace.load(tmp_path / "trace.safetensors")):
            found = model(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CLASSES)
def test_audit(name: str) -> None:
    model = zoo.tiny_model(name).to(DEVICE)
    page = audit(model, zoo.tokenizer(), zoo.texts(40), length=32).markdown()
    assert "nan" not in page


@pytest.mark.parametrize("router", ["smoe", "xmoe", "hyperrouter", "loss-free"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_other_routers(name: str, router: str) -> None:
    model = zoo.tiny_model(name).to(DEVICE)
    hf.replace_routers(model, router)
    other = copy.deepcopy(model).cpu()
    expected, found = (one(IDS.to(one.device)).logits.float().cpu() for one in (other, model))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    model.train()
    model(IDS.to(DEVICE)).logits.float().square().mean().backward()
    step_end(model)
