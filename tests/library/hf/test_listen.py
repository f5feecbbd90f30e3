"""Recording, freezing and monitoring on the stock classes of transformers; verify."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, get_ident
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import pointsman
import pointsman.traces
from pointsman import hf
from pointsman.diagnostics import Diagnostics, RoutingMonitor, scalars
from pointsman.hf.gates import find_gates
from pointsman.hf.given import Given, Running, say_once
from pointsman.traces.trace import hash_of
from tests.library.hf import zoo
from tests.library.hf.test_replace import spread

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def run(model: Any, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, attention_mask=mask, use_cache=False)[0]
    return found


def test_what_has_no_router_is_refused_by_all_of_them() -> None:
    dense = zoo.tiny_model("vitpose_backbone")
    for model in (dense, torch.nn.Linear(4, 4)):
        for attempt in (
            lambda model=model: pointsman.record_routing(model),
            lambda model=model: RoutingMonitor(model),
            lambda model=model: Diagnostics().observe(model).__enter__(),
            lambda model=model: pointsman.replay_routing(model, {}),
        ):
            with pytest.raises(ValueError, match=r"known are MoE and Router of pointsman.*Mixtral, Qwen3-MoE"):
                attempt()
    with pytest.raises(ValueError, match=r"freeze: .*known are MoE and Router"):
        pointsman.freeze(dense, "router")


def test_padding_is_not_counted_in_a_stock_model() -> None:
    model = spread(zoo.tiny_model("qwen3_moe"))
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    monitor, diagnostics = RoutingMonitor(model, every=1), Diagnostics("load", "specialisation")
    with monitor.observe(1), diagnostics.observe(model), pointsman.record_routing(model) as records:
        run(model, mask)
    rows = {row["layer"]: row for row in monitor.rows() if row["kind"] == "routing"}
    for name, routing in records.items():
        real = routing.experts[mask.flatten().bool()]
        wanted = torch.bincount(real.flatten(), minlength=8).double()
        assert rows[name]["tokens"] == 17
        assert rows[name]["load"] == pytest.approx((wanted / wanted.sum()).tolist())
        found = diagnostics.result()[name]
        assert found["load"]["share"] == pytest.approx((wanted / wanted.sum()).tolist())
        assert "specialisation" in found  # the model's own token ids are known


def test_six_numbers_and_the_choice_without_the_bias() -> None:
    model = zoo.tiny_model("deepseek_v3", n_group=1)
    gate = model.model.layers[0].mlp.gate
    gate.e_score_correction_bias.copy_(torch.tensor([9.0, 8, 0, 0, 0, 0, 0, 0]))
    monitor = RoutingMonitor(model, every=1)
    seen: list[Any] = []
    handle = gate.register_forward_hook(lambda m, args, output: seen.append(args[0]))
    with monitor.observe(1):
        run(model)
    handle.remove()
    row = monitor.rows()[0]
    logits = seen[0].double().reshape(-1, 32) @ gate.weight.detach().double().T
    raw = torch.bincount(logits.topk(2, -1).indices.flatten(), minlength=8).double()
    values = scalars([row])
    assert set(values) == {
        f"routing/{row['layer']}/{name}"
        for name in ("entropy", "cv", "dead", "largest", "dropped", "logit_scale", "raw_cv", "raw_largest")
    }
    found = {name.rpartition("/")[2]: value for name, value in values.items()}
    assert found["largest"] == 0.5  # experts 0 and 1 take all
    assert found["cv"] == pytest.approx(math.sqrt(3))
    assert found["dead"] == 6
    assert found["dropped"] == 0
    assert found["logit_scale"] == pytest.approx(float(logits.std(-1, correction=0).mean()), rel=1e-4)
    assert found["raw_largest"] == pytest.approx(float(raw.max() / raw.sum()))
    assert found["raw_cv"] == pytest.approx(float(raw.std(correction=0) / raw.mean()))


def seen_masks(model: Any, **given: Any) -> dict[str, list[int] | None]:
    """Layer -> real tokens of each row, None where no padding is known."""
    masks: dict[str, Any] = {}

    def keep(layer: str, routing: Any, context: Any) -> None:
        masks[layer] = None if context is None else context.padding_mask

    with torch.no_grad(), pointsman.record_routing(model, keep):
        model(input_ids=IDS, **given)
    return {layer: None if mask is None else mask.sum(1).tolist() for layer, mask in masks.items()}


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])  # masks of gpt_oss are a dict, by kind of layer
def test_padding_is_known_from_every_mask_and_of_the_model_that_runs(kind: str, tmp_path: Path) -> None:
    model, mask = spread(zoo.tiny_model(kind)), torch.ones_like(IDS)
    mask[0, :7] = mask[1, 10:] = 0
    real, causal = [5, 10], torch.ones(12, 12).tril().bool() & mask[:, None, None].bool()
    added = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    of_kinds = {"full_attention": causal, "sliding_attention": causal}
    for given in (mask, causal, added, *([of_kinds] if kind == "gpt_oss" else [])):
        assert set(map(tuple, seen_masks(model, attention_mask=given).values())) == {tuple(real)}
        assert set(map(tuple, seen_masks(model.model, attention_mask=given).values())) == {tuple(real)}
    with pointsman.record_routing(model).save(tmp_path / "t"), torch.no_grad():
        model(IDS, attention_mask=mask)
        model.model(IDS + 1)  # neither the mask nor the token ids of the call before are its own
        model.model(IDS, attention_mask=mask)
    trace = pointsman.traces.RoutingTrace.load(tmp_path / "t")
    assert trace.lengths.tolist() == [*real, 12, 12, *real]
    assert torch.equal(trace.hashes[:2], trace.hashes[4:])
    assert trace.hashes[2] == hash_of(IDS[0] + 1)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_counts_no_padding_whatever_its_cache(cache: str | None) -> None:
    model, mask, seen = spread(zoo.tiny_model("mixtral")), torch.ones_like(IDS), []
    mask[0, :7] = 0
    with pointsman.record_routing(model, lambda layer, routing, context: seen.append(context)):
        model.generate(IDS, attention_mask=mask, max_new_tokens=3, do_sample=False, cache_implementation=cache)
    assert [context.padding_mask.sum(1).tolist() for context in seen[::2]] == [[5, 12], [1, 1], [1, 1]]


def test_a_mask_that_does_not_tell_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    model = spread(zoo.tiny_model("mixtral"))
    with torch.no_grad(), pointsman.record_routing(model.model.layers[0].mlp, lambda *_: None):
        model(IDS)
    assert not caplog.records
    given = Given(model)
    given.running.append(Running(model, {"attention_mask": torch.ones(3)}, 0, False, 0))
    assert given.context("model.layers.0.mlp.gate", 24) is given.context("model.layers.1.mlp.gate", 24) is None
    (record,) = caplog.records
    assert "1 dimensions does not say which of the tokens are padding: every token counts" in record.getMessage()


def test_gates_that_read_a_part_of_the_tokens_have_no_mask() -> None:
    """Of Ernie 4.5 VL each MoE block reads either the tokens of the text or those of the images."""
    model, mask, images = zoo.tiny_model("ernie4_5_vl_moe"), torch.ones_like(IDS), torch.zeros_like(IDS)
    mask[0, :5] = 0
    images[:, 5:9] = 1
    assert set(seen_masks(model, attention_mask=mask, moe_mm_token_type_ids=images).values()) == {None}
    images[0, 9] = 1  # no number of whole columns
    hf.balance(model.train())
    with torch.enable_grad():
        outputs = model(IDS, attention_mask=mask, moe_mm_token_type_ids=images)
        assert 0.5 < float(pointsman.add_losses(torch.zeros(()), model).detach()) * 100 < 4
    del outputs


def test_each_thread_has_its_own_padding() -> None:
    model, meet, found = spread(zoo.tiny_model("mixtral")), Barrier(2, timeout=60), {}

    def keep(layer: str, routing: Any, context: Any) -> None:
        found.setdefault(get_ident(), set()).add(int(context.padding_mask.sum()))

    def forward(real: int) -> int:
        model(IDS[:1], attention_mask=(torch.arange(12) < real)[None].long(), use_cache=False)
        assert found[get_ident()] == {real}
        return real

    def wait(*_: Any) -> None:
        meet.wait()

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(wait)
    with pointsman.record_routing(model, keep), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(forward, [12, 6])) == [12, 6]


def test_a_trace_of_several_threads_holds_whole_forwards(tmp_path: Path) -> None:
    model, meet, known = spread(zoo.tiny_model("mixtral")), Barrier(2, timeout=60), {}
    texts = [IDS[:1], IDS[1:, :9], IDS[:1] + 1, IDS[1:] + 1]

    def forward(given: list[Tensor]) -> None:
        with torch.no_grad():
            for ids in given:
                model(ids, use_cache=False)

    def wait(*_: Any) -> None:
        meet.wait()

    for ids in texts:
        with pointsman.record_routing(model) as records:
            forward([ids])
        known[hash_of(ids[0])] = {layer: routing.experts for layer, routing in records.items()}
    for layer in model.model.layers:  # both threads are in the same layer
        layer.register_forward_pre_hook(wait)
        layer.self_attn.register_forward_hook(wait)
    with pointsman.record_routing(model).save(tmp_path / "t"), ThreadPoolExecutor(2) as pool:
        list(pool.map(forward, [texts[:2], texts[2:]]))
    trace = pointsman.traces.RoutingTrace.load(tmp_path / "t")
    hashes = trace.hashes.tolist()
    assert sorted(hashes) == sorted(known)
    for layer, experts in trace.experts.items():
        assert torch.equal(experts.long(), torch.cat([known[one][layer] for one in hashes]))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_gates_are_known_under_autocast_as_well(kind: str) -> None:
    model = spread(zoo.tiny_model(kind))
    plain = {gate.name: gate.form for gate in find_gates(model)}
    with torch.autocast("cpu", torch.bfloat16):
        assert {gate.name: gate.form for gate in find_gates(model)} == plain
        with pointsman.set_top_k(model, 1), pointsman.record_routing(model) as records:
            run(model)
    assert {routing.experts.shape[-1] for routing in records.values()} == {1}


def test_a_decoder_has_no_padding_of_the_encoder() -> None:
    model, mask = zoo.tiny_model("switch_transformers", decoder_start_token_id=0), torch.ones_like(IDS)
    mask[1, 4:] = 0
    seen = seen_masks(model, attention_mask=mask, labels=IDS[:, :8].contiguous())
    assert {layer.partition(".")[0]: real for layer, real in seen.items()} == {"encoder": [12, 4], "decoder": None}
    own = {"decoder_input_ids": IDS, "decoder_attention_mask": mask.flip(0)}
    assert {layer.partition(".")[0]: real for layer, real in seen_masks(model, **own).items()} == {
        "encoder": None, "decoder": [4, 12]
    }  # fmt: skip


def test_a_replaced_table_knows_the_padding() -> None:
    model, mask = spread(zoo.tiny_model("deepseek_v4")), torch.ones_like(IDS)
    mask[1, 4:] = 0
    hf.replace_routers(model, "hash:columns=2:gate=sqrtsoftplus")
    assert set(map(tuple, seen_masks(model, attention_mask=mask).values())) == {(12, 4)}


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_freeze_by_role(kind: str) -> None:
    model = zoo.tiny_model(kind)
    with pytest.raises(ValueError, match="did you mean 'router'"):
        pointsman.freeze(model, "routers")
    pointsman.freeze(model, "router")
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name in dict(model.named_parameters()) if ".gate." in name and "shared" not in name}
    pointsman.freeze(model, "experts")
    assert not any(one.requires_grad for name, one in model.named_parameters() if ".experts." in name)


class Rows(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[index % 2], "labels": IDS[index % 2]}


@pytest.mark.parametrize(("every", "often"), [(2, 1), (None, 0.5)])
def test_the_trainer_logs_the_routing(tmp_path: Any, every: int | None, often: float) -> None:
    model = zoo.tiny_model("mixtral")
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, logging_steps=often,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Rows())
    trainer.add_callback(hf.RoutingLog(trainer, every))
    trainer.train()
    logged = [row for row in trainer.state.log_history if "routing/model.layers.0.mlp/entropy" in row]
    assert [row["step"] for row in logged] == [2, 4]
    losses = [row["step"] for row in trainer.state.log_history if "loss" in row]
    assert losses == ([1, 2, 3, 4] if often == 1 else [2, 4])  # the trainer's own log goes on
    assert set(logged[0]) == {"epoch", "step"} | {
        f"routing/model.layers.{layer}.mlp/{name}"
        for layer in range(2)
        for name in ("entropy", "cv", "dead", "largest", "dropped", "logit_scale")
    }
    assert not model.model.layers[0].mlp.gate._forward_hooks
    with pytest.raises(ValueError, match="every=0: allowed are whole numbers from 1"):
        hf.RoutingLog(trainer, every=0)


def test_checkpointing_does_not_count_a_forward_twice() -> None:
    model = zoo.tiny_model("mixtral").train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    monitor = RoutingMonitor(model, every=1)
    with monitor.observe(1):
        model(IDS, labels=IDS, use_cache=False).loss.backward()
    assert [row["tokens"] for row in monitor.rows() if row["kind"] == "routing"] == [24, 24]


@pytest.mark.filterwarnings("ignore")  # lightning's own
def test_lightning_logs_the_routing() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from pointsman.engines.lightning import RoutingLog, StepEnd

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.moe = pointsman.MoE(8, 16, 4, router="loss-free:rate=0.1")

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return pointsman.add_losses(self.moe(batch).square().mean(), self)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    rows = torch.utils.data.DataLoader(torch.randn(8, 6, 8), batch_size=2)
    logged: list[dict[str, float]] = []

    class Kept(lightning.callbacks.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=4, callbacks=[StepEnd(), RoutingLog(every=2), Kept()],
    )  # fmt: skip
    trainer.fit(module, rows)
    assert "routing/moe/entropy" not in logged[0]
    assert {"routing/moe/entropy", "routing/moe/cv", "routing/moe/raw_cv"} <= set(logged[1])
    moved = (module.moe.router.select.bias * 10).round().tolist()
    assert set(moved) <= {-1.0, 0.0, 1.0}  # one step
    assert any(moved)


def test_verify_names_what_differs(tmp_path: Any) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    model.save_pretrained(tmp_path)
    hf.verify(model, tmp_path)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[1].mlp.gate.weight.copy_(changed.model.layers[1].mlp.gate.weight.flip(0))
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.gate.weight: its values differ") as error:
        hf.verify(model, changed)
    assert "model.layers.1.mlp: routing: " in str(error.value)
    assert "tokens go elsewhere" in str(error.value)
    assert "logits: they differ by" in str(error.value)
    assert "layers.0" not in str(error.value)
    with pytest.raises(ValueError, match=r"only the second has 9 tensors"):
        hf.verify(zoo.tiny_model("mixtral"), zoo.tiny_model("mixtral", num_hidden_layers=3))
    with pytest.raises(ValueError, match="verify: Linear is no model of transformers"):
        hf.verify(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no mixture of experts matches 'Linear'"):
        hf.upcycle(torch.nn.Linear(2, 2), 4)
    with torch.device("meta"):
        offloaded = type(model)(model.config)
    with pytest.raises(ValueError, match=r"verify: a model's weights are offloaded"):
        hf.verify(model, offloaded)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_model_that_was_compiled_before_is_observed_and_balanced() -> None:
    """Code of torch.compile calls no hooks that came after it: never recorded as {}, never balanced by nothing."""
    model = zoo.tiny_model("mixtral").train()
    compiled = torch.compile(model, backend="eager")
    ids = torch.randint(64, (2, 8))
    compiled(input_ids=ids)
    with pointsman.record_routing(model) as records:
        compiled(input_ids=ids)
    assert len(records) == model.config.num_hidden_layers
    monitor = RoutingMonitor(model, every=1)
    with monitor.observe(1):
        compiled(input_ids=ids)
    with pytest.raises(ValueError, match=r"no router ran in 1 observed steps; .* torch\.compiler\.reset"):
        monitor.rows()
    hf.balance(model)
    plain = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(compiled(input_ids=ids, labels=ids).loss, plain)
