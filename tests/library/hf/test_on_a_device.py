"""Hugging Face models on a CUDA device: our experts, recorded routings, other routers, balance."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import pointsman.hf as hf
from pointsman import record_routing, step_end
from pointsman.ops.kernels import Kernels, using
from pointsman.traces import RoutingTrace
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
@pytest.mark.parametrize("name", CLASSES)
def test_our_experts_equal_the_models_own(name: str, way: str) -> None:
    """In float32: in bfloat16 a near tie in one layer sends a token of the next to another expert."""
    exact, model = zoo.tiny_model(name).double(), zoo.tiny_model(name).to(DEVICE)
    for one in (exact, model):
        one.set_experts_implementation("eager")
    expected = stepped(exact)
    model.set_experts_implementation("pointsman")
    with using(Kernels(gpu=way)):
        found = stepped(model)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= 1e-3 * float(other.norm()) + 1e-6
    with torch.no_grad():
        assert model.generate(IDS[:, :5].to(DEVICE), max_new_tokens=4, do_sample=False).shape == (3, 9)


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("tokens", [72, 2])  # the second: `batched_mm`
@pytest.mark.parametrize("name", CLASSES)
def test_experts_in_bfloat16(name: str, tokens: int, way: str) -> None:
    model = zoo.tiny_model(name)
    experts = next(module for path, module in model.named_modules() if path.endswith(".experts")).to(torch.bfloat16)
    index = torch.rand(tokens, experts.num_experts).topk(3, dim=-1).indices
    dim = experts.down_proj.shape[-1 if experts.is_transposed else 1]
    hidden, weights = torch.randn(tokens, dim).bfloat16(), torch.rand(tokens, 3)

    def figures(implementation: str, kind: torch.dtype, device: str) -> list[torch.Tensor]:
        experts.to(device, kind).zero_grad()
        experts.config._experts_implementation = implementation
        leaves = tuple(one.detach().requires_grad_() for one in (hidden.to(device, kind), weights.to(device)))
        output = experts(leaves[0], index.to(device), leaves[1])
        output.double().square().sum().backward()
        own = [one.grad for one in (*leaves, *experts.parameters()) if one.grad is not None]
        return [one.detach().double().cpu() for one in (output, *own)]

    exact = figures("eager", torch.float64, "cpu")
    with using(Kernels(gpu=way)):
        found = figures("pointsman", torch.bfloat16, DEVICE)
    for one, other in zip(found, exact, strict=True):
        assert float((one - other).norm()) <= 4e-2 * float(other.norm())


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
