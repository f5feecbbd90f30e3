"""experts_implementation="pointsman" gives what the class's own experts give, forward and backward."""

import pytest
import torch

import pointsman.hf  # noqa: F401
from tests.library.hf import zoo

CLASSES = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "muse_spark", "aria", "inkling2")


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [11, 2, 1])
def test_equals_eager(name: str, dtype: torch.dtype, tokens: int) -> None:
    model = zoo.tiny_model(name)
    experts = next(module for path, module in model.named_modules() if path.endswith(".experts")).to(dtype)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.2)
    dim, count = experts.down_proj.shape[-1 if experts.is_transposed else 1], experts.num_experts
    generator = torch.Generator().manual_seed(0)
    index = torch.rand(tokens, count, generator=generator).topk(3, dim=-1).indices
    index[index == count - 1] = 0  # one expert stays without tokens, and some tokens choose one twice
    results = {}
    for implementation in ("eager", "pointsman"):
        experts.config._experts_implementation = implementation
        experts.zero_grad()
        hidden = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        weights = torch.rand(tokens, 3, generator=torch.Generator().manual_seed(2)).requires_grad_()
        output = experts(hidden, index, weights)
        assert output.dtype == dtype
        output.float().square().sum().backward()
        tensors = [output, hidden.grad, weights.grad, *(parameter.grad for parameter in experts.parameters())]
        results[implementation] = [tensor.detach().float() for tensor in tensors if tensor is not None]
    assert len(results["eager"]) == len(results["pointsman"]) >= 5
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    for expected, given in zip(results["eager"], results["pointsman"], strict=True):
        assert float((given - expected).norm()) <= tolerance * float(expected.norm())


def test_no_copy_of_fused_weights() -> None:
    """Gate and up are halves of one tensor; the fast path reads them where they are."""
    from pointsman.experts.apply import _each_contiguous

    fused = torch.randn(3, 2 * 5, 4)
    gate, up = fused.unflatten(1, (2, -1)).unbind(1)
    for half in (gate, up):
        seen = _each_contiguous(half)
        assert seen is not None
        assert seen.data_ptr() == half.data_ptr()
    transposed = fused.transpose(1, 2)
    copied = _each_contiguous(transposed)
    assert copied is not None
    assert copied.is_contiguous()


def test_from_pretrained(tmp_path: object) -> None:
    from transformers import AutoModelForCausalLM

    model = zoo.tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    ids = torch.arange(3, 15).reshape(2, 6)
    logits = {}
    for name in ("eager", "grouped_mm", "pointsman"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=name)
        logits[name] = loaded(ids).logits
    torch.testing.assert_close(logits["pointsman"], logits["eager"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits["pointsman"], logits["grouped_mm"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "tokens", "taken"), [
    ("mixtral", 20, "ours"), ("mixtral", 2, "batched_mm"), ("gpt_oss", 20, "grouped_mm"), ("gpt_oss", 2, "batched_mm"),
])  # fmt: skip
def test_what_other_devices_take(name: str, tokens: int, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "meta" stands for a GPU."""
    from pointsman.hf import experts as module

    seen: list[str] = []

    def noting(name: str) -> object:
        return lambda *given: (seen.append(name), torch.empty(tokens, 1))[1]

    monkeypatch.setattr(module, "apply_experts", noting("ours"))
    for way in ("batched_mm", "grouped_mm"):
        monkeypatch.setattr(module.huggingface, f"{way}_experts_forward", noting(way))
    model = zoo.tiny_model(name)
    experts = next(one for path, one in model.named_modules() if path.endswith(".experts")).to("meta")
    dim = experts.down_proj.shape[-1 if experts.is_transposed else 1]
    index = torch.zeros(tokens, 3, dtype=torch.int64, device="meta")
    module.experts_forward(experts, torch.empty(tokens, dim, device="meta"), index, torch.empty(tokens, 3))
    assert seen == [taken]
