"""replace_routers keeps the model's function, its losses, generation, checkpoints; materialize gives it back plain."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import pointsman
from pointsman import hf
from pointsman.control import named_routers
from tests.library.hf import zoo
from tests.library.hf.conftest import FIVE

PRESERVING = ("smoe", "hyperrouter", "hyperrouter:share=true", "smoe-dropout", "frozen-temperature")
IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))


STOCK = """
import sys
sys.modules["pointsman"] = None  # importing it fails
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
folders = list(Path(sys.argv[1]).iterdir())
assert len(folders) == 10
for folder in folders:
    expected = torch.load(folder / "expected.pt")
    dtype = expected["logits"].dtype
    model, report = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    with torch.no_grad():
        assert torch.equal(model(expected["ids"]).logits, expected["logits"]), folder
    assert not hasattr(model.config, "pointsman")
"""
ANEW = """
import sys, torch
import pointsman.hf
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
expected = torch.load(folder + "/expected.pt")
model, report = AutoModelForCausalLM.from_pretrained(folder + "/model", output_loading_info=True)
assert not report["missing_keys"] and not report["unexpected_keys"], report
with torch.no_grad():
    torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"], rtol=1e-5, atol=1e-6)
"""


def spread(model: Any) -> Any:
    """The same model with gates that decide: their logits differ by more than rounding."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight", "router.layer.weight", "router.classifier.weight")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            if name.endswith("router.bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), 8, generator=generator).topk(buffer.shape[1]).indices)
    return model


def logits(model: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS, **kwargs).logits


def move(model: Any) -> None:
    """Changes whatever the routers can train."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".pointsman." in name and parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.2)


@pytest.mark.parametrize("spec", PRESERVING)
def test_first_forward_is_the_original(five: str, spec: str) -> None:
    model = spread(zoo.tiny_model(five))
    before = logits(model)
    assert hf.replace_routers(model, spec) is model
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["mixtral", "hunyuan_v1_moe"])
@pytest.mark.parametrize("removed", [False, True])
def test_a_model_over_several_devices_gets_routers_and_plain_gates(name: str, removed: bool) -> None:
    """accelerate keeps the forward of every module that it dispatched, and leaves it there when it goes."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = spread(zoo.tiny_model(name))
    before = logits(model)
    hooks.attach_execution_device_hook(model, "cpu")
    if removed:
        hooks.remove_hook_from_submodules(model)
    hf.replace_routers(model, "smoe")
    assert torch.equal(logits(model), before)
    move(model)
    trained = logits(model)
    assert not torch.allclose(trained, before, atol=1e-6)
    assert torch.equal(logits(hf.materialize(model)), trained)


@pytest.mark.parametrize("spec", ["xmoe+similarity", "frozen-temperature", "hyperrouter"])
def test_weights_that_accelerate_offloads_are_there_when_they_are_read(spec: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = hf.replace_routers(zoo.tiny_model("mixtral"), spec)
    before = logits(model)
    assert torch.equal(logits(accelerate.cpu_offload(model, "cpu")), before)


def test_mixing_by_attention_says_where_the_projection_is_offloaded() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = hf.replace_routers(zoo.tiny_model("mixtral"), "smoe+attention")
    with pytest.raises(ValueError, match="weight, which is offloaded: keep the attention's layers on a device"):
        logits(accelerate.cpu_offload(model, "cpu"))


@pytest.mark.parametrize("spec", [*PRESERVING, "xmoe", "xmoe-torchscale", "frozen-scaled"])
def test_router_matters_and_survives_a_checkpoint(five: str, spec: str, tmp_path: Path) -> None:
    model = spread(zoo.tiny_model(five))
    before = logits(model)
    hf.replace_routers(model, spec)
    move(model)
    trained = logits(model)
    if spec not in ("smoe-dropout", "frozen-scaled"):
        assert not torch.allclose(trained, before, atol=1e-6)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {router.spec.partition(":")[0] for _, router in named_routers(loaded)} == {spec.partition(":")[0]}
    torch.testing.assert_close(logits(loaded), trained, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits(copy.deepcopy(loaded)), trained, rtol=1e-5, atol=1e-6)
    torch.save(loaded, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    torch.testing.assert_close(logits(whole), trained, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "changes", "gates"),
    [
        ("switch_transformers", {}, 2),  # encoder and decoder have copies of the configuration, which are not saved
        ("nllb_moe", {"encoder_layers": 4, "decoder_layers": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 4}, 3),
    ],
)
def test_encoder_and_decoder_survive_a_checkpoint(
    name: str, changes: dict[str, Any], gates: int, tmp_path: Path
) -> None:
    model = spread(zoo.tiny_model(name, **changes))
    hf.replace_routers(model, "smoe|hyperrouter" if gates == 2 else "smoe|hyperrouter|smoe-dropout")
    move(model)
    specs = {path: router.spec for path, router in named_routers(model)}
    assert len(specs) == gates
    model.save_pretrained(tmp_path)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not {*report["missing_keys"], *report["unexpected_keys"]}
    assert {path: router.spec for path, router in named_routers(loaded)} == specs
    torch.testing.assert_close(
        logits(loaded, decoder_input_ids=IDS), logits(model, decoder_input_ids=IDS), rtol=1e-5, atol=1e-6
    )
    hf.materialize(loaded)
    assert "pointsman" not in loaded.config.to_dict()


def test_loading_without_a_replaced_layer_is_refused(tmp_path: Path) -> None:
    hf.replace_routers(zoo.tiny_model("mixtral"), "hyperrouter").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks 1 of the 2 gates whose routers were saved: 'layers\.1\.mlp\.gate'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=1)


@pytest.mark.parametrize("spec", ["hyperrouter", "smoe", "frozen-temperature"])
def test_gradients_reach_the_router_only_where_it_trains(five: str, spec: str) -> None:
    model = hf.replace_routers(spread(zoo.tiny_model(five)), spec).train()
    model(IDS, labels=IDS).loss.backward()
    of_router = {name: p.grad for name, p in model.named_parameters() if ".pointsman." in name}
    kept = {"hyperrouter": "embedding", "smoe": "weight", "frozen-temperature": "log_temperature"}[spec]
    assert {name.rpartition(".")[2] for name in of_router} <= {kept, "bias"}
    assert any(grad is not None and bool(grad.any()) for grad in of_router.values())


def test_aux_loss_and_router_logits(five: str) -> None:
    model = spread(zoo.tiny_model(five))
    expected = model(IDS, labels=IDS, output_router_logits=True)
    hf.replace_routers(model, "hyperrouter")
    given = model(IDS, labels=IDS, output_router_logits=True)
    assert len(given.router_logits) == len(expected.router_logits) > 0
    for ours, theirs in zip(given.router_logits, expected.router_logits, strict=True):
        assert torch.equal(ours, theirs)
    if expected.get("aux_loss") is not None:
        assert torch.equal(given.aux_loss, expected.aux_loss)
    assert torch.equal(given.loss, expected.loss)


def test_generate(five: str) -> None:
    model = spread(zoo.tiny_model(five))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    before = model.generate(IDS, **settings)
    hf.replace_routers(model, "hyperrouter")
    assert torch.equal(model.generate(IDS, **settings), before)
    with pointsman.set_top_k(model, 1):
        one = model.generate(IDS, output_logits=True, return_dict_in_generate=True, **settings)
    two = model.generate(IDS, output_logits=True, return_dict_in_generate=True, **settings)
    assert not torch.allclose(one.logits[0], two.logits[0])


def test_gradient_checkpointing(five: str) -> None:
    model = hf.replace_routers(spread(zoo.tiny_model(five)), "hyperrouter").train()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_materialized_is_the_same_and_stock(tmp_path: Path) -> None:
    for name in FIVE:
        for dtype in (torch.float32, torch.bfloat16):
            folder = tmp_path / f"{name}-{dtype}"
            spread(zoo.tiny_model(name)).save_pretrained(folder / "model")
            model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
            hf.replace_routers(model, "hyperrouter")
            move(model)
            trained = logits(model)
            pointsman.materialize(model)
            assert not any("pointsman" in key for key in model.state_dict())
            assert not hasattr(model.config, "pointsman")
            if dtype == torch.float32:
                assert torch.equal(logits(model), trained)
            model.save_pretrained(folder / "model")
            torch.save({"ids": IDS, "logits": logits(model)}, folder / "expected.pt")
    run(STOCK, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_materialized_gates_follow_a_change_of_the_dtype(dtype: torch.dtype) -> None:
    model = spread(zoo.tiny_model("mixtral")).to(torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)
    hf.replace_routers(model, "hyperrouter")
    model.to(dtype)
    pointsman.materialize(model)
    assert model.model.layers[0].mlp.gate.weight.dtype == dtype
    assert model(IDS).logits.dtype == dtype


def run(script: str, folder: Path) -> None:
    """A script in a new process, given a folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_from_pretrained_in_a_new_process(tmp_path: Path) -> None:
    model = hf.replace_routers(spread(zoo.tiny_model("mixtral")), "hyperrouter:share=true|xmoe")
    move(model)
    model.save_pretrained(tmp_path / "model")
    torch.save({"ids": IDS, "logits": logits(model)}, tmp_path / "expected.pt")
    run(ANEW, tmp_path)


def test_bfloat16_checkpoint_keeps_the_router_in_float32(tmp_path: Path) -> None:
    spread(zoo.tiny_model("mixtral")).save_pretrained(tmp_path)
    model = hf.replace_routers(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), "hyperrouter")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kinds = {
        name.rpartition(".")[2]: tensor.dtype for name, tensor in loaded.state_dict().items() if ".pointsman." in name
    }
    assert set(kinds.values()) == {torch.float32}
    assert loaded.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    torch.testing.assert_close(logits(loaded), logits(model))


def test_large_hypernetworks_are_shared() -> None:
    from pointsman.hf.surgery.scorers import shared_by_default

    assert shared_by_default("hyperrouter:embed_dim=64", 2048, 128) == "hyperrouter:embed_dim=64:share=true"
    assert shared_by_default("hyperrouter", 256, 8) == "hyperrouter"
    assert shared_by_default("hyperrouter:share=false", 2048, 128) == "hyperrouter:share=false"
    assert shared_by_default("xmoe", 2048, 128) == "xmoe"


def test_shared_hypernetwork_is_saved_once() -> None:
    model = hf.replace_routers(zoo.tiny_model("mixtral"), "hyperrouter:share=true")
    assert sum("hypernetwork.2.weight" in name for name in model.state_dict()) == 1
    unshared = hf.replace_routers(zoo.tiny_model("mixtral"), "hyperrouter")
    assert sum("hypernetwork.2.weight" in name for name in unshared.state_dict()) == 2


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("xmoe:gate=sigmoid", "works with 'smoe', 'loss-free', 'sparsemixer'"),
        ("smoe:balance=0.1", "pointsman.hf.balance"),
        ("smoe:bias=true", "option 'bias' of 'smoe:bias=true': MixtralTopKRouter has no bias"),
        ("smoe:kind=copy", "no virtual experts without nulls"),
        ("thor", "defined by its selection"),
        ("switch", "defined by its selection"),
        ("mask", "'mask' is defined by its selection"),
        ("stable", "'stable' is defined by its selection"),
        ("dense", "without a router"),
        ("hyperruter", "did you mean 'hyperrouter'"),
    ],
)
def test_refusals_change_nothing(spec: str, words: str) -> None:
    model = zoo.tiny_model("mixtral")
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=words):
        hf.replace_routers(model, f"smoe|{spec}")
    assert list(model.state_dict()) == names
    assert not hasattr(model.config, "pointsman")


def test_an_attention_that_shows_nothing_changes_nothing() -> None:
    model = zoo.tiny_model("mixtral")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="needs sdpa, not 'flash_attention_2'"):
        hf.replace_routers(model, "smoe+attention")
    model.config._attn_implementation = "sdpa"
    assert not any(hasattr(module, "pointsman") for module in model.modules())
    hf.replace_routers(model, "smoe+attention")


def test_a_block_without_its_model_is_refused() -> None:
    with pytest.raises(ValueError, match="Sequential has no transformers model"):
        hf.replace_routers(torch.nn.Sequential(zoo.tiny_model("mixtral").model.layers[0].mlp), "smoe")


def test_materialize_refuses_by_layer() -> None:
    model = hf.replace_routers(zoo.tiny_model("mixtral"), "hyperrouter|xmoe")
    before = logits(model)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp.*xmoe"):
        hf.materialize(model)
    assert torch.equal(logits(model), before)
    with pytest.raises(ValueError, match="no layer"):
        hf.materialize(zoo.tiny_model("mixtral"))
    with pytest.raises(ValueError, match="materialize"):
        hf.replace_routers(model, "smoe")


@pytest.mark.parametrize("name", ["inkling", "zaya", "gemma4"])
def test_class_without_the_shared_gate_is_refused_by_name(name: str) -> None:
    model = zoo.tiny_model(name)
    names = list(model.state_dict())
    with pytest.raises(ValueError, match="Router"):
        hf.replace_routers(model, "hyperrouter")
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("smoe", "for those, call pointsman.hf.materialize(model) before saving"),
        ("xmoe", "plain gates cannot be made of these routers (materialize: layer 'model.layers.0.mlp'"),
        ("loss-free", "has the router 'loss-free'; the rule of MixtralTopKRouter is 'smoe:bias=false')"),
    ],
)
def test_saving_says_once_who_can_open_the_checkpoint(
    spec: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = zoo.tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    assert not caplog.records
    hf.replace_routers(model, spec, start="fresh")
    for _ in range(2):
        model.save_pretrained(tmp_path)
    (record,) = (one for one in caplog.records if one.name == "pointsman.hf")
    message = record.getMessage()
    assert says in message
    assert "random gates (2 layers)" in message
    assert "\n" not in message
    if "for those, call" in says:
        hf.materialize(model)


def test_quantisers_leave_routers_alone() -> None:
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = hf.replace_routers(zoo.tiny_model("mixtral"), "xmoe+similarity", start="fresh")
    loaded = AutoModelForCausalLM.from_config(model.config)
    skipped = HfQuantizer.get_modules_to_not_convert(loaded, None, loaded._keep_in_fp32_modules)
    linear = [name for name, module in loaded.named_modules() if isinstance(module, torch.nn.Linear)]
    left = [name for name in linear if not should_convert_module(name, skipped)]
    assert left == [name for name in linear if ".pointsman." in name or name == "lm_head"]
    assert len(left) == 3
