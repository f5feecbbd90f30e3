"""The audit of untouched models: its figures against plain computations, and what it keeps apart."""

import copy
import json
import math
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import pointsman
from pointsman import hf
from pointsman.hf.counterpart import counterpart
from pointsman.hf.listen import GateListener
from pointsman_lab.checkpoints import audit, compress
from pointsman_lab.checkpoints.audit.precision import Precisions
from pointsman_lab.checkpoints.text import KINDS, text_batches
from tests.library.hf import zoo
from tests.library.hf.test_replace import spread
from tests.library.hf.zoo import texts, tokenizer


def test_batches_keep_every_token_in_order() -> None:
    found = list(text_batches(tokenizer(), texts(), length=8, batch_size=3, max_tokens=None))
    real = torch.cat([batch.ids[batch.mask] for batch in found]).tolist()
    assert real == [token for text in texts() for token in tokenizer()(text)["input_ids"]]
    assert all(batch.ids.shape[0] <= 3 and batch.ids.shape[1] <= 8 for batch in found)
    few = list(text_batches(tokenizer(), texts(), length=8, batch_size=3, max_tokens=20))
    assert sum(int(batch.mask.sum()) for batch in few) == 20


def test_conversations_tell_content_from_template() -> None:
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w2 w3 w4"}]
    (batch,) = text_batches(tokenizer(), [messages], length=64, batch_size=1, max_tokens=None)
    kinds = [KINDS[kind] for kind in batch.kinds[0].tolist()]
    assert kinds == ["template"] * 3 + ["text"] * 2 + ["special"] + ["template"] * 3 + ["text"] * 3 + ["special"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "w1 w2"}]}, {"role": "assistant", "content": None}]
    broken = [{"role": "user"}, "w1"]
    with pytest.raises(ValueError, match="a list of messages such as"):
        list(text_batches(tokenizer(), [broken], length=64, batch_size=1, max_tokens=None))
    listed = tokenizer()
    listed.chat_template = (
        "{% for m in messages %}{% for p in m['content'] or [] %}<| {{ p['text'] }} {% endfor %}{% endfor %}"
    )
    (batch,) = text_batches(listed, [parts], length=64, batch_size=1, max_tokens=None)
    assert [KINDS[kind] for kind in batch.kinds[0].tolist()] == ["template", "text", "text"]
    refusing = tokenizer()
    refusing.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        list(text_batches(refusing, [messages], length=64, batch_size=1, max_tokens=None))
    plain = tokenizer()
    plain.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        list(text_batches(plain, [messages], length=64, batch_size=1, max_tokens=None))


def plain_loss(model: Any, k: int) -> tuple[float, int]:
    total, count = 0.0, 0
    with torch.no_grad(), pointsman.set_top_k(model, k):
        for text in texts():
            ids = torch.tensor([tokenizer()(text)["input_ids"]])
            for start in range(0, ids.shape[1], 16):
                row = ids[:, start : start + 16]
                logs = torch.log_softmax(model(row).logits[0, :-1].double(), -1)
                total -= float(logs.gather(1, row[0, 1:, None]).sum())
                count += row.shape[1] - 1
    return total, count


def test_quality_at_every_k(five: str) -> None:
    model = spread(zoo.tiny_model(five))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    result = audit(model, tokenizer(), texts(), top_k=[1, 2, 4], length=16, batch_size=4)
    assert [row["top_k"] for row in result.quality] == [1, 2, 4]
    for row in result.quality:
        total, count = plain_loss(model, row["top_k"])
        assert row["tokens"] == count
        assert row["loss"] == pytest.approx(total / count, rel=1e-4)
        assert row["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-3)
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.num_experts_per_tok == 2


def test_figures_of_the_gates_against_a_plain_count(five: str) -> None:
    model = spread(zoo.tiny_model(five))
    gates = hf.gates.find_gates(model)
    seen: dict[str, list[tuple[Any, ...]]] = {gate.layer: [] for gate in gates}
    handles = [
        gate.module.register_forward_hook(lambda m, a, out, layer=gate.layer: seen[layer].append(out)) for gate in gates
    ]
    with torch.no_grad():
        for text in texts():
            ids = torch.tensor([tokenizer()(text)["input_ids"]])
            for start in range(0, ids.shape[1], 16):
                model(ids[:, start : start + 16])
    for handle in handles:
        handle.remove()
    result = audit(model, tokenizer(), texts(), top_k=[2], length=16, batch_size=4)
    assert set(result.layers) == set(seen)
    for gate in gates:
        chosen = torch.cat([out[2].reshape(-1, 2) for out in seen[gate.layer]])
        logits = torch.cat([out[0].reshape(-1, 8) for out in seen[gate.layer]]).double()
        share = torch.bincount(chosen.reshape(-1), minlength=8).double() / chosen.numel()
        load = result.layers[gate.layer]["load"]
        assert load["share"] == pytest.approx(share.tolist())
        assert load["dead"] == [i for i, part in enumerate(share.tolist()) if part == 0]
        probs = torch.sigmoid(logits) if five == "deepseek_v3" else torch.softmax(logits, -1)
        rows = probs / probs.sum(-1, keepdim=True)
        entropy = -(rows * rows.log()).sum(-1).mean()
        assert result.layers[gate.layer]["entropy"]["mean"] == pytest.approx(float(entropy), rel=1e-4)
        best = probs.sort(-1, descending=True).values
        assert result.layers[gate.layer]["margin"]["mean"] == pytest.approx(
            float((best[:, 1] - best[:, 2]).mean()), rel=1e-3
        )
        assert {"collapse", "specialisation", "co_activation", "bfloat16"} <= result.layers[gate.layer].keys()


def test_padding_and_special_tokens_are_counted_apart() -> None:
    model = spread(zoo.tiny_model("mixtral"))
    marked = [f"{text} <e>" for text in texts()]
    with_special = audit(model, tokenizer(), marked, top_k=[2], length=64, batch_size=6)
    one_by_one = audit(model, tokenizer(), marked, top_k=[2], length=64, batch_size=1)
    assert with_special.tokens["special"] == 6
    assert with_special.tokens["padding"] > 0
    assert one_by_one.tokens["padding"] == 0
    for layer, found in with_special.layers.items():
        assert found["load"]["tokens"] == with_special.tokens["text"]
        assert found["load"]["share"] == pytest.approx(one_by_one.layers[layer]["load"]["share"], abs=1e-9)
        assert found["apart"]["special"]["load"]["tokens"] == 6
        assert found["apart"]["padding"]["load"]["tokens"] == with_special.tokens["padding"]
    assert with_special.quality[0]["loss"] == pytest.approx(one_by_one.quality[0]["loss"], rel=1e-5)


def test_router_precision_sees_a_near_tie() -> None:
    model = spread(zoo.tiny_model("mixtral"))
    calm = audit(model, tokenizer(), texts(), top_k=[2])
    gate = hf.gates.find_gates(model)[0].module
    with torch.no_grad():  # the two best experts' scores differ by less than bf16 resolves
        gate.weight[0].mul_(5)
        gate.weight[1] = gate.weight[0] * (1 + 1e-3 * torch.randn(32, generator=torch.Generator().manual_seed(3)))
    tied = audit(model, tokenizer(), texts(), top_k=[1])
    layer = "model.layers.0.mlp"
    assert calm.layers[layer]["bfloat16"]["sets"] < 0.2
    assert tied.layers[layer]["bfloat16"]["top1"] > calm.layers[layer]["bfloat16"]["top1"]


def test_against_another_checkpoint() -> None:
    model = spread(zoo.tiny_model("olmoe"))
    same = audit(model, tokenizer(), texts(), top_k=[2], against=copy.deepcopy(model))
    assert all(layer["fluctuation"]["top1"] == 0 for layer in same.layers.values())
    assert same.against is not None
    assert same.against["loss"] == pytest.approx(same.quality[0]["loss"])
    other = copy.deepcopy(model)
    with torch.no_grad():
        for gate in hf.gates.find_gates(other):
            gate.module.weight.copy_(gate.module.weight.roll(1, 0))  # every expert becomes its neighbour
    moved = audit(model, tokenizer(), texts(), top_k=[2], against=other)
    assert moved.layers["model.layers.0.mlp"]["fluctuation"]["top1"] == 1
    assert any("changed their first expert" in sentence for sentence in moved.findings())
    assert moved.against is not None
    loss, change = moved.against["loss"], moved.against["difference"]
    assert change["mean"] == pytest.approx(loss - moved.quality[0]["loss"])
    shown = f"| the other | {loss:.4f} ± {moved.against['half']:.4f} | {change['mean']:+.4f} ± {change['half']:.4f} |"
    assert shown in moved.markdown()
    assert "| moved |" in moved.markdown()
    assert "The other checkpoint" not in audit(model, tokenizer(), texts(1), top_k=[2]).markdown()
    with pytest.raises(ValueError, match="JambaForCausalLM"):
        audit(model, tokenizer(), texts(), against=zoo.tiny_model("jamba"))
    with pytest.raises(ValueError, match="4] experts"):
        audit(model, tokenizer(), texts(), against=zoo.tiny_model("olmoe", num_experts=4))


class ShorterBlock(torch.nn.Module):
    """A block that routes all tokens of a sequence but the last."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.block(hidden[:, :-1].contiguous()), hidden[:, -1:]], 1)


def test_a_gate_that_reads_other_tokens_is_noted() -> None:
    model = spread(zoo.tiny_model("mixtral"))
    model.model.layers[0].mlp = ShorterBlock(model.model.layers[0].mlp)
    result = audit(model, tokenizer(), texts(1), top_k=[1, 2], length=12, against=copy.deepcopy(model))
    assert set(result.layers) == {"model.layers.1.mlp"}
    assert result.layers["model.layers.1.mlp"]["fluctuation"]["top1"] == 0
    assert result.notes == ["model.layers.0.mlp.block: its input is not the text's tokens"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft's use of transformers
def test_prompt_tuning_is_refused_in_one_line() -> None:
    peft = pytest.importorskip("peft")
    model = spread(zoo.tiny_model("mixtral"))
    tuned = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match=r"no gate of \w+ can be observed: its input is not the text's tokens"):
        audit(tuned, tokenizer(), texts(1), length=12)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_is_audited_without_prunings() -> None:
    peft = pytest.importorskip("peft")
    model = spread(zoo.tiny_model("mixtral"))
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    result = audit(tuned, tokenizer(), texts(8), length=12)
    assert result.notes == [
        "experts that can go left out: PeftModelForCausalLM is no class of transformers: take the model in it (PEFT: "
        "merge_and_unload)"
    ]
    assert result.analyses["schedules"]


def test_a_gate_on_the_disk_is_audited_without_costs(tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    result = audit(model, tokenizer(), texts(8), top_k=[2], length=12)
    accelerate = pytest.importorskip("accelerate")
    model.save_pretrained(tmp_path / "model")
    parts = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    places = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    found = audit(offloaded, tokenizer(), texts(8), length=12)
    assert found.quality[0]["loss"] == pytest.approx(result.quality[0]["loss"])
    why = "model.layers.1.mlp.gate: its weights are on the meta device; load them first"
    assert f"cost to serve left out: {why}" in found.notes
    found.save(tmp_path / "out")
    assert not found.analyses["serving"]
    hooked = spread(zoo.tiny_model("mixtral"))
    for layer in hooked.model.layers:  # as where a model is dispatched over several devices
        accelerate.hooks.add_hook_to_module(layer.mlp.gate, accelerate.hooks.AlignDevicesHook(torch.device("cpu")))
    copies: list[str] = []
    hooked.__class__ = type("Counted", (type(hooked),), {"__deepcopy__": lambda *_: copies.append("one")})
    listener = GateListener(hooked, "audit")
    precisions = Precisions(listener)
    with precisions.compare(torch.ones(8, dtype=torch.bool)):
        hooked(torch.arange(8)[None])
    assert precisions.found.keys() == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert not copies  # a copied gate leads to no model
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    wholly = audit(model, tokenizer(), texts(8), length=12)
    assert wholly.quality[0]["loss"] == pytest.approx(result.quality[0]["loss"])
    assert wholly.protocol["device"] == "cpu"


def test_findings_and_summary(tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("gpt_oss"))
    gate = hf.gates.find_gates(model)[0].module
    with torch.no_grad():
        gate.bias.zero_()
        gate.bias[3], gate.bias[5] = 50.0, -50.0
    calls: list[tuple[int, int | None]] = []
    result = audit(model, tokenizer(), texts(), batch_size=2, max_tokens=60, progress=lambda *now: calls.append(now))
    assert calls[-1] == (60, 60)
    assert len(calls) > 1
    assert 5 in result.dead()["model.layers.0.mlp"]
    assert result.hot()["model.layers.0.mlp"] == [3]
    assert any("no text token" in sentence for sentence in result.findings())
    text = result.markdown()
    assert "| 2 (own) |" in text
    assert "| 1 |" in text
    assert all(len(line) <= 80 or line.startswith("|") for line in text.splitlines())
    assert "larger is less collapsed" in " ".join(text.split())
    assert result.cheapest_top_k() in [row["top_k"] for row in result.quality]
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["model"] == "GptOssForCausalLM"


@pytest.mark.parametrize("part", ["lm_head.weight", "model.layers.0.mlp.gate.weight"])
def test_a_sick_model_has_an_audit(part: str, tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    with torch.no_grad():
        model.get_parameter(part)[0] = torch.nan
    result = audit(model, tokenizer(), texts(8), top_k=[1, 2])
    assert [row["loss"] for row in result.quality] == [None, None]
    assert result.quality[0]["perplexity"] is None
    assert sum("the loss is nan" in note for note in result.notes) == 2
    assert "| 1 | - | - |" in result.markdown()
    result.save(tmp_path)
    json.loads((tmp_path / "audit.json").read_text())


def test_a_class_that_fails_at_another_k_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    experts = model.model.layers[1].mlp.experts
    right, failing = experts.forward, [1]

    def fails(hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if indices.shape[-1] in failing:
            raise RuntimeError("not with one")
        return right(hidden, indices, weights)

    monkeypatch.setattr(experts, "forward", fails)
    result = audit(model, tokenizer(), texts(8), top_k=[1, 2, 3])
    assert [row["top_k"] for row in result.quality] == [2, 3]
    assert any("k = 1" in note and "not with one" in note for note in result.notes)
    result.save(tmp_path)
    assert json.loads((tmp_path / "explorer.json").read_text())["top_k"] == [2, 3]
    failing.append(2)  # its own
    with pytest.raises(ValueError, match=r"MixtralForCausalLM itself fails on the text \(not with one\)"):
        audit(model, tokenizer(), texts(8), top_k=[1, 2])


def test_tokens_without_an_embedding() -> None:
    model = spread(zoo.tiny_model("mixtral"))
    model.resize_token_embeddings(3)
    with pytest.raises(ValueError, match=r"the tokenizer gives token \d+, and MixtralForCausalLM has 3 embeddings"):
        audit(model, tokenizer(), texts(4), top_k=[1])
    with pytest.raises(ValueError, match=r"MixtralForCausalLM has 3 embeddings"):
        audit(zoo.tiny_model("mixtral"), tokenizer(), texts(4), top_k=[1], against=model)
    with pytest.raises(ValueError, match=r"MixtralForCausalLM has 3 embeddings"):
        compress(model, tokenizer(), texts(4))


def test_a_short_content_is_not_found_in_the_template() -> None:
    writing = tokenizer()
    writing.chat_template = "{% for m in messages %}w1 {{ m['role'] }} {{ m['content'] }} {% endfor %}"
    messages = [{"role": "user", "content": "w2"}, {"role": "assistant", "content": "w1"}]
    (batch,) = text_batches(writing, [messages], length=64, batch_size=1, max_tokens=None)
    kinds = [KINDS[kind] for kind in batch.kinds[0].tolist()]
    assert kinds[-1] == "text"
    assert kinds.count("text") == 2


def test_of_a_replaced_router() -> None:
    model = hf.replace_routers(spread(zoo.tiny_model("mixtral")), "smoe+similarity")
    with torch.no_grad():
        for _, router in pointsman.control.named_routers(model):
            router.mix.strength.value.fill_(0.9)
    result = audit(model, tokenizer(), texts(), top_k=[2])
    entropy = result.layers["model.layers.0.mlp"]["entropy"]
    assert entropy["mixed_mean"] != entropy["mean"]


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.tiny_model("mixtral")
    with pytest.raises(ValueError, match="no text"):
        audit(model, tokenizer(), [])
    with pytest.raises(ValueError, match="from 1 to 8"):
        audit(model, tokenizer(), texts(), top_k=[9])
    with pytest.raises(ValueError, match=r"top_k=1: allowed is a list of values of k: \[1\]"):
        audit(model, tokenizer(), texts(), top_k=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a text is a string or"):
        audit(model, tokenizer(), [3])
    monkeypatch.setattr(sys.modules[audit.__module__], "AuditRun", None)  # refused before the first batch
    for wrong, words in (
        ({"length": 0}, "length=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"texts": "one string"}, "'text' is one string"),
        ({"texts": {"en": "w1 w2"}}, "texts: 'en' is one string; it must be a list"),
        ({"task": [([{"role": "user"}, "w1"], "w3")]}, "task: the tokenizer rejects the prompt"),
        ({"task": [("", "w3")]}, "the prompt '' has no token"),
    ):
        with pytest.raises(ValueError, match=words):
            audit(model, tokenizer(), **{"texts": texts(), **wrong})
    with pytest.raises(ValueError, match="no gate"):
        audit(torch.nn.Linear(2, 2), tokenizer(), texts())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text() -> None:
    model = zoo.tiny_model("mixtral")
    peaks = []
    for count in (50, 400):
        tracemalloc.start()
        result = audit(model, tokenizer(), (text for text in texts(count)), max_tokens=None, top_k=[2])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(result.tokens.values()) > 10 * count
    assert peaks[1] < 1.5 * peaks[0] + 2**20


@pytest.mark.parametrize("rows", [[10], [16, 1], [1, 15]])
def test_half_a_text_without_a_token_to_predict_tries_nothing(rows: list[int]) -> None:
    result = audit(
        zoo.tiny_model("mixtral"), tokenizer(), [" ".join(["w1"] * n) for n in rows], top_k=(1, 2), length=16
    )
    for what in ("super experts left out", "k by layer left out", "experts that can go left out"):
        assert any(f"{what}: the text is too short" in note for note in result.notes), result.notes


def test_audit_names_router_and_shared_experts() -> None:
    model = spread(zoo.tiny_model("deepseek_v3"))
    spec = counterpart(hf.gates.find_gates(model)[0])
    result = audit(model, tokenizer(), texts(1), length=12)
    assert {layer["router"] for layer in result.layers.values()} == {spec}
    told = f"Router of 2 layers: {spec}, as this library spells it, with 1 shared expert."
    assert result.findings()[0] == told
    gemma = audit(spread(zoo.tiny_model("gemma4")), tokenizer(), texts(1))
    assert "a router without a counterpart here (Gemma4TextRouter normalises its input, and" in " ".join(
        gemma.markdown().split()
    )
    assert {layer["without"] is None for layer in gemma.layers.values()} == {False}
