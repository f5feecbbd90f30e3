"""Replay on the stock classes of transformers: of a routing, and of a trace, in other batches and checkpointed."""

import copy
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import pointsman
import pointsman.traces
from pointsman import hf
from pointsman.hf.gates import find_gates
from tests.library.hf import zoo
from tests.library.hf.test_listen import IDS, run
from tests.library.hf.test_replace import spread

CHOSEN = ("mixtral", "deepseek_v3", "dbrx", "llama4", "jetmoe")
"""Softmax; a bias and groups; the block chooses; scores in place of weights; assignments sorted by expert."""


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_recorded_routing_is_replayed_on_a_stock_class(kind: str) -> None:
    model = spread(zoo.tiny_model(kind))
    with pointsman.record_routing(model) as records:
        plain = run(model)
    assert len(records) == 2
    torch.testing.assert_close(run(model), plain)
    with pointsman.replay_routing(model, records):
        torch.testing.assert_close(run(model), plain, rtol=1e-5, atol=1e-6)
    other = {name: (routing.chosen + 1) % routing.num_experts for name, routing in records.items()}
    with pointsman.replay_routing(model, other), pointsman.record_routing(model) as again:
        assert not torch.allclose(run(model), plain)
    for name, experts in other.items() if kind != "dbrx" else ():  # what DBRX's gate returns are logits
        torch.testing.assert_close(again[name].chosen.sort(-1).values, experts.sort(-1).values)
    torch.testing.assert_close(run(model), plain)


def test_experts_of_groups_that_the_class_shuts_out_have_their_weights() -> None:
    groups = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "num_group": 2}
    model = spread(zoo.tiny_model("deepseek_v2", **groups))
    with pointsman.record_routing(model) as records:
        run(model)
    other = {name: (routing.chosen + 4) % 8 for name, routing in records.items()}  # of the other group
    with pointsman.replay_routing(model, other), pointsman.record_routing(model) as again:
        run(model)
    for routing in again.values():
        torch.testing.assert_close(routing.weights, torch.softmax(routing.logits, -1).gather(1, routing.chosen))


@pytest.mark.parametrize("kind", ["mixtral", "dbrx"])
def test_an_inner_replay_leaves_the_outer_one(kind: str) -> None:
    model = spread(zoo.tiny_model(kind))
    with pointsman.record_routing(model) as records:
        plain = run(model)
    other = {name: (routing.chosen + 1) % routing.num_experts for name, routing in records.items()}
    outer, inner = pointsman.replay_routing(model, other), pointsman.replay_routing(model, records)
    for _ in range(2):
        with outer:
            around = run(model)
            with inner:
                torch.testing.assert_close(run(model), plain, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(run(model), around)
            assert not torch.allclose(around, plain)
        torch.testing.assert_close(run(model), plain)


@pytest.mark.parametrize("kind", ["mixtral", "dbrx", "pointsman"])
def test_a_replay_inside_that_of_a_trace_goes_first_and_nothing_stays(kind: str, tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("mixtral" if kind == "pointsman" else kind))
    if kind == "pointsman":
        hf.replace_routers(model, "smoe:bias=false")
    with pointsman.record_routing(model).save(tmp_path / "t.safetensors"):
        run(model)
    with pointsman.record_routing(model) as records:
        plain = run(model)
    other = {name: (routing.chosen + 1) % routing.num_experts for name, routing in records.items()}
    with pointsman.replay_routing(model, other):
        changed = run(model)
    assert not torch.allclose(changed, plain)
    trace = pointsman.traces.RoutingTrace.load(tmp_path / "t.safetensors")
    for first in (False, True):
        with hf.replay(model, trace):
            if first:
                torch.testing.assert_close(run(model), plain, rtol=1e-5, atol=1e-6)
            with pointsman.replay_routing(model, other):
                torch.testing.assert_close(run(model), changed)
            torch.testing.assert_close(run(model), plain, rtol=1e-5, atol=1e-6)
        model(input_ids=IDS[:, :4])
        assert not any("forward" in vars(gate.module) or "forward" in vars(gate.block) for gate in find_gates(model))


@pytest.mark.parametrize("kind", ["mixtral", "dbrx"])
def test_a_replay_leaves_the_hooks_of_accelerate(kind: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, calls = spread(zoo.tiny_model(kind)), []

    class Counts(hooks.ModelHook):  # type: ignore[name-defined, misc]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(module)
            return args, kwargs

    gate = find_gates(model)[0]
    hooks.add_hook_to_module(gate.block if kind == "dbrx" else gate.module, Counts())
    with pointsman.record_routing(model) as records:
        run(model)
    with pointsman.replay_routing(model, records):
        calls.clear()
        run(model)
        assert len(calls) == 1
    run(model)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss", "dbrx", "jetmoe"])
def test_a_trace_is_replayed_in_other_batches(kind: str, tmp_path: Path) -> None:
    model = spread(zoo.tiny_model(kind))
    with pointsman.record_routing(model).save(tmp_path / "t.safetensors", logits=True):
        plain = run(model)
    trace = pointsman.traces.RoutingTrace.load(tmp_path / "t.safetensors")
    assert trace.hashes is not None
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for gate in find_gates(changed):
            gate.module.get_submodule(gate.form.owner).weight.mul_(-1)  # would choose others
    with hf.replay(model, trace), pointsman.record_routing(model) as records, torch.no_grad():
        padded = torch.cat([IDS.flip(0), torch.zeros(2, 3, dtype=IDS.dtype)], 1)
        found = model(input_ids=padded, attention_mask=(torch.arange(15) < 12).expand(2, -1).long())[0]
    torch.testing.assert_close(found[:, :12].flip(0), plain, rtol=1e-4, atol=1e-5)
    real = torch.arange(15).repeat(2) < 12
    for layer, logits in trace.logits.items():
        again = records[layer].logits[real].unflatten(0, (2, 12)).flip(0).flatten(0, 1)
        torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-5)
    with hf.replay(changed, trace), pointsman.record_routing(changed) as records:
        run(changed)
    for layer, experts in trace.experts.items() if kind != "dbrx" else ():
        torch.testing.assert_close(records[layer].chosen.sort(-1).values, experts.long().sort(-1).values)
    served = {name: experts.clone() for name, experts in trace.experts.items()}
    for experts in served.values():
        experts[[11, 23]] = pointsman.traces.MISSING  # the last of each sequence, as an engine leaves it
    gaps = dataclasses.replace(trace, experts=served)
    with pytest.raises(ValueError, match="2 of 24 tokens have no recorded experts"), hf.replay(model, gaps):
        pass
    with hf.replay(model, gaps, missing="own"):
        torch.testing.assert_close(run(model), plain, rtol=1e-4, atol=1e-5)
    with hf.replay(changed, gaps, missing="own"), pointsman.record_routing(changed) as records:
        run(changed)
    for layer, experts in served.items() if kind != "dbrx" else ():
        known = (experts >= 0).all(-1)
        torch.testing.assert_close(records[layer].chosen[known].sort(-1).values, experts[known].long().sort(-1).values)
    other = run(changed)
    with pointsman.record_routing(changed):
        torch.testing.assert_close(run(changed), other)  # afterwards it chooses itself
    with hf.replay(model, trace), pytest.raises(ValueError, match="sequence 0 of the forwards, 12 tokens"):
        model(input_ids=IDS + 1)
    one = {"layer": next(iter(trace.experts.values()))}
    shorter = dataclasses.replace(trace, experts=one, num_experts={"layer": 8}, logits={}, weights={})
    with pytest.raises(ValueError, match="the trace has 1 layers"), hf.replay(model, shorter):
        pass


def traced(path: Path, model: Any, *texts: Tensor) -> pointsman.traces.RoutingTrace:
    with pointsman.record_routing(model).save(path), torch.no_grad():
        for text in texts:
            model(input_ids=text, use_cache=False)
    return pointsman.traces.RoutingTrace.load(path)


@pytest.mark.parametrize("spec", [None, "loss-free:gate=softmax"])
@pytest.mark.parametrize("reentrant", [False, True, None])  # None: the wrapper of FSDP
def test_checkpointing_gives_each_forward_its_own_experts_again(
    spec: str | None, reentrant: bool | None, tmp_path: Path
) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    trace = traced(tmp_path / "t", model, IDS)
    gradients = []
    for checkpointed in (False, True):
        other = spread(zoo.tiny_model("mixtral", seed=1)).train()
        if spec is not None:
            hf.replace_routers(other, spec)
        if checkpointed and reentrant is None:
            other.model.layers = torch.nn.ModuleList(map(checkpoint_wrapper, other.model.layers))
        elif checkpointed:
            other.activation_checkpointing_enable({"use_reentrant": reentrant})
        with hf.replay(other, trace):
            for _ in range(2):
                losses = [other(input_ids=row[None], labels=row[None], use_cache=False).loss for row in IDS]
                sum(losses).backward()
        gradients.append([one.grad for one in other.parameters() if one.grad is not None])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_outside_of_a_replay_is_refused(reentrant: bool, tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    trace = traced(tmp_path / "t", model, IDS)
    model.train().activation_checkpointing_enable({"use_reentrant": reentrant})
    before = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    with pytest.raises(ValueError, match="a forward again that did not run inside"), hf.replay(model, trace):
        before.backward()
    with pytest.raises(ValueError, match="backward must lie inside"), hf.replay(model, trace):
        model(input_ids=IDS, use_cache=False)
    with hf.replay(model, trace), torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    model.activation_checkpointing_disable()
    with hf.replay(model, trace):
        loss = checkpoint(partial(model, use_cache=False), IDS, labels=IDS, use_reentrant=False)[0]
        with pytest.raises(ValueError, match="none of transformers or FSDP"):
            loss.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_model_is_replayed_uncompiled(tmp_path: Path) -> None:
    model, other = spread(zoo.tiny_model("mixtral")), spread(zoo.tiny_model("mixtral", seed=1))
    trace = traced(tmp_path / "t", model, IDS)
    own = run(other)
    with hf.replay(other, trace):
        wanted = run(other)
    assert not torch.allclose(wanted, own)
    routing = {layer: experts.long() for layer, experts in trace.experts.items()}
    other.compile(backend="eager")
    for replayed in (lambda: hf.replay(other, trace), lambda: pointsman.replay_routing(other, routing)):
        torch.testing.assert_close(run(other), own)  # code from before the replay
        with replayed():
            torch.testing.assert_close(run(other), wanted)
    torch.testing.assert_close(run(other), own)


def test_a_forward_that_failed_waits_for_no_backward(tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    trace = traced(tmp_path / "t", model, IDS)
    model.train().activation_checkpointing_enable({"use_reentrant": False})
    inputs = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    with hf.replay(model, trace):
        with pytest.raises(IndexError), model.model.layers[1].register_forward_hook(lambda *_: [][0]):
            model(**inputs)
        model(**inputs).loss.backward()


@pytest.mark.parametrize("hashed", [True, False])
def test_a_replay_takes_no_experts_of_another_text(hashed: bool, tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    trace = traced(tmp_path / "t", model, IDS, IDS[:, :1])
    trace = trace if hashed else dataclasses.replace(trace, hashes=None)
    with hf.replay(model, trace), pointsman.record_routing(model) as records:
        model.model(IDS)  # the inner model takes those of its own tokens
        model(IDS[:1, :1])
        for layer, routing in records.items():
            assert torch.equal(routing.chosen.sort(-1).values, trace.experts[layer][24:25].long().sort(-1).values)
        with pytest.raises(ValueError, match="is not in the trace"):
            model.model(IDS.flip(1))
        with pytest.raises(ValueError, match=r"no input_ids for the 24 tokens of layer 'model\.layers\.0\.mlp'"):
            model(inputs_embeds=torch.zeros(2, 12, 32))
        with pytest.raises(ValueError, match="no input_ids for the 5 tokens"):
            model.model.layers[0].mlp.gate(torch.zeros(5, 32))
    with hf.replay(model, trace), pytest.raises(ValueError, match="from a key-value cache, as in generate"):
        model.generate(IDS, max_new_tokens=3, do_sample=False, eos_token_id=None)


def test_a_replica_of_data_parallel_is_recorded_but_not_replayed(tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    trace = traced(tmp_path / "t", model, IDS)
    copies = {part: part._replicate_for_data_parallel() for part in model.modules()}  # as nn.DataParallel does
    for part, copied in copies.items():
        copied._modules = {name: child and copies[child] for name, child in part._modules.items()}
        for name, own in (*part._parameters.items(), *part._buffers.items()):
            setattr(copied, name, own)
    with pointsman.record_routing(model) as records:
        run(copies[model])
    assert records.keys() == trace.experts.keys()
    with pytest.raises(ValueError, match="DataParallel copies the gates"), hf.replay(model, trace):
        run(copies[model])


def test_a_replay_reads_masks_of_four_dimensions(tmp_path: Path) -> None:
    model, causal = spread(zoo.tiny_model("mixtral")), torch.ones(1, 1, 12, 12).tril().bool()
    trace = traced(tmp_path / "t", model, IDS)
    plain = run(model)
    with hf.replay(model, trace):
        torch.testing.assert_close(run(model, causal), plain, rtol=1e-5, atol=1e-6)
        with pytest.raises(ValueError, match="9 tokens, is not in the trace"):
            run(model, causal.expand(2, -1, -1, -1) & (torch.arange(12) < 9))


def test_own_choices_are_other_experts_than_the_recorded_ones(tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("mixtral", num_experts_per_tok=3))
    trace = traced(tmp_path / "t", model, IDS)
    partly = {name: experts.clone() for name, experts in trace.experts.items()}
    for experts in partly.values():
        experts[:, 0] = pointsman.traces.MISSING  # the best one; by order of the others it is known again
        experts[::2, 2] = pointsman.traces.MISSING
    gaps = dataclasses.replace(trace, experts=partly)
    with pytest.raises(ValueError, match="with missing='own' they choose their own"), hf.replay(model, gaps):
        pass
    with hf.replay(model, gaps, missing="own"), pointsman.record_routing(model) as records:
        run(model)
    for name, experts in trace.experts.items():
        assert torch.equal(records[name].chosen.sort(-1).values, experts.long().sort(-1).values)


def test_replayed_weights_and_gradients_are_those_of_the_class_by_hand() -> None:
    model = zoo.tiny_model("mixtral")
    gate, layer = model.model.layers[0].mlp.gate, "model.layers.0.mlp"
    hidden = torch.randn(24, 32, generator=torch.Generator().manual_seed(2))
    experts = torch.stack([torch.arange(24) % 8, (torch.arange(24) + 3) % 8], 1)
    with pointsman.replay_routing(model, {layer: experts}):
        weights = gate(hidden)[1]
    weights.square().sum().backward()
    found = gate.weight.grad.clone()
    weight = gate.weight.detach().double().requires_grad_()
    probs = torch.softmax(hidden.double() @ weight.T, -1).gather(1, experts)
    wanted = probs / probs.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-6)
    wanted.square().sum().backward()
    torch.testing.assert_close(found.double(), weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "layer", "why"),
    [
        ("phimoe", "model.layers.0.mlp", "PhimoeTopKRouter does not choose by topk"),
        ("mixtral", "model.layers.7.mlp", "did you mean 'model.layers.1.mlp'"),
    ],
)
def test_what_cannot_be_replayed_is_refused(kind: str, layer: str, why: str) -> None:
    model = zoo.tiny_model(kind)
    experts = torch.stack([torch.arange(24) % 8, (torch.arange(24) + 3) % 8], 1)
    with pytest.raises(ValueError, match=why), pointsman.replay_routing(model, {layer: experts}):
        run(model)
    with pytest.raises(ValueError, match=r"allowed experts are 0 to 7$"):
        pointsman.replay_routing(zoo.tiny_model("mixtral"), {"model.layers.0.mlp": experts - 1})


def test_a_forward_that_returns_nothing_is_done_again_in_its_backward(tmp_path: Path) -> None:
    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of = zoo.tiny_model("mixtral").train()

        def forward(self, input_ids: Tensor) -> None:
            inputs = self.of.get_input_embeddings()(input_ids)
            self.loss = self.of.model(inputs_embeds=inputs).last_hidden_state.square().mean()

    model = Keeps()
    with torch.no_grad(), pointsman.record_routing(model) as record:
        model(IDS)
    record.save(tmp_path / "trace.safetensors", IDS)
    model.of.activation_checkpointing_enable({"use_reentrant": False})
    with hf.replay(model, pointsman.traces.RoutingTrace.load(tmp_path / "trace.safetensors")):
        model(IDS)
        model.loss.backward()
