"""hf.balance: the loss per layer and counted once, whatever the loop does; the bias moved once a step."""

import copy
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    MixtralForTokenClassification,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers import modeling_switch_transformers as switch

import pointsman
from pointsman import hf
from pointsman.diagnostics import RoutingMonitor
from tests.library.hf import zoo

IDS = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "transformers")


def mixtral(layers: int = 2, k: int = 2, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 64, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_local_experts": 4, "num_experts_per_tok": k}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts, use_cache=False, **changes)).train()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(30)  # a choice that is not balanced
    return model


def gates(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers]


def gate_gradients(model: Any) -> Tensor:
    return torch.cat([gate.weight.grad.flatten() for gate in gates(model)])


def by_hand(model: Any, ids: Tensor, mask: Tensor | None = None) -> float:
    """In float64, from each gate's own output: the mean over layers of E sum_i f_i P_i over real tokens."""
    seen: list[Any] = []
    handles = [gate.register_forward_hook(lambda m, i, out: seen.append(out)) for gate in gates(model)]
    with torch.no_grad():
        model(ids, attention_mask=mask)
    for handle in handles:
        handle.remove()
    real = [True] * ids.numel() if mask is None else mask.flatten().bool().tolist()
    total = 0.0
    for logits, _, experts in seen:
        logits, count, mean = logits.double(), [0.0] * 4, [0.0] * 4
        for token, counts in enumerate(real):
            if counts:
                for expert in experts[token].tolist():
                    count[expert] += 1
                for expert, p in enumerate(torch.softmax(logits[token], -1).tolist()):
                    mean[expert] += p / sum(real)
        total += 4 * sum(c / sum(count) * p for c, p in zip(count, mean, strict=True))
    return total / len(seen)


def added(model: Any, ids: Tensor, mask: Tensor | None = None, coefficient: float = 1.0) -> float:
    """What balance adds to the loss that the model returns."""
    plain = model(ids, attention_mask=mask, labels=ids).loss
    hf.balance(model, coefficient)
    return float((model(ids, attention_mask=mask, labels=ids).loss - plain).detach()) / coefficient


def test_the_loss_is_that_of_each_layer_without_padding() -> None:
    mask = torch.ones_like(IDS)
    mask[0, :5] = mask[2, :7] = 0
    for given in (None, mask):
        model = mixtral()
        assert added(model, IDS, given) == pytest.approx(by_hand(model, IDS, given), abs=2e-6)
    assert by_hand(model, IDS, mask) != pytest.approx(by_hand(model, IDS), abs=1e-3)


def collapsed() -> Any:
    """Four layers that each send every token to one expert, another one each."""
    sizes = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 64, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, **experts, use_cache=False)).train()
    with torch.no_grad():
        for place, layer in enumerate(model.model.layers):
            layer.mlp.router.weight.zero_()
            layer.mlp.router.bias.zero_()[place] = 20.0
    return model


def test_a_collapsed_model_has_loss_4_where_transformers_says_1() -> None:
    assert added(collapsed(), IDS) == pytest.approx(4, abs=1e-5)
    stock = collapsed()
    outputs = stock(IDS, output_router_logits=True)
    assert float(outputs.aux_loss.detach()) == pytest.approx(1, abs=1e-5)
    hf.balance(stock, 1.0, like="transformers")
    assert float(stock(IDS, labels=IDS).aux_loss.detach()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_perfect_balance_is_1_for_every_k(k: int) -> None:
    for like, value in ((None, 1.0), ("transformers", float(k))):
        model = mixtral(k=k)
        for gate in gates(model):
            torch.nn.init.zeros_(gate.weight)
        hf.balance(model, like=like)
        assert float(model(IDS, labels=IDS).aux_loss.detach()) == pytest.approx(value, abs=1e-6)


def test_like_transformers_is_their_value() -> None:
    mask = torch.ones_like(IDS)
    mask[1, :6] = 0
    model = mixtral()
    outputs = model(IDS, attention_mask=mask, output_router_logits=True)
    wanted = load_balancing_loss_func(outputs.router_logits, 4, 2, mask)
    hf.balance(model, like="transformers")
    found = model(IDS, attention_mask=mask, labels=IDS).aux_loss
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_the_losses_of_a_router_are_those_of_transformers() -> None:
    hidden = torch.randn(1, 90, 32, generator=torch.Generator().manual_seed(3))
    for spec, k in (("smoe:bias=false:balance=2", 2), ("switch:bias=false:balance=1:z_loss=1", 1)):
        router = pointsman.build_router(spec, dim=32, num_experts=8, top_k=k).eval()
        routing, logits = router(hidden), hidden @ router.score.weight.T
        if k == 2:
            wanted = {"balance": load_balancing_loss_func((logits[0],), 8, k)}
        else:
            balance = switch.load_balancing_loss_func(torch.softmax(logits, -1), logits.argmax(-1))
            wanted = {"balance": balance, "z_loss": switch.router_z_loss_func(logits)}
        torch.testing.assert_close(routing.losses, wanted)


def test_like_transformers_with_a_mask_of_the_encoder_alone() -> None:
    mask, values = torch.ones_like(IDS), []
    mask[1, :6] = 0
    for own in ({}, {"decoder_attention_mask": torch.ones_like(IDS)}):
        model = hf.balance(zoo.tiny_model("switch_transformers").train(), like="transformers")
        for part in model.modules():
            part.training = part is model  # without noise
        model(input_ids=IDS, attention_mask=mask, decoder_input_ids=IDS, **own)
        values.append(pointsman.add_losses(torch.zeros(()), model))
    assert torch.equal(*values)


def test_the_own_loss_is_off_and_counted_once() -> None:
    model = mixtral(output_router_logits=True, router_aux_loss_coef=5.0)
    plain = mixtral()(IDS, labels=IDS).loss
    hf.balance(model, 0.5)
    hf.balance(model, 0.1)  # the second call replaces the first
    wanted = plain + 0.1 * by_hand(model, IDS)
    for asked in ({}, {"output_router_logits": True}):
        torch.testing.assert_close(model(IDS, labels=IDS, **asked).loss, wanted, rtol=1e-5, atol=1e-5)
    model.config.output_router_logits = True  # as TRL's SFTTrainer does
    torch.testing.assert_close(model(IDS, labels=IDS).loss, wanted, rtol=1e-5, atol=1e-5)
    model.eval()
    torch.testing.assert_close(model(IDS, labels=IDS).loss, plain, rtol=1e-5, atol=1e-5)
    asked_for = model(IDS, labels=IDS, output_router_logits=True)
    torch.testing.assert_close(asked_for.loss, plain, rtol=1e-5, atol=1e-5)
    assert float(asked_for.aux_loss.detach()) == pytest.approx(by_hand(model, IDS), abs=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at inputs
def test_checkpointing_compilation_and_a_copy_change_nothing() -> None:
    plain = hf.balance(mixtral(), 1.0)
    plain(IDS, labels=IDS).loss.backward()
    wanted = gate_gradients(plain)
    again = hf.balance(mixtral(), 1.0)
    again.activation_checkpointing_enable()
    compiled = hf.balance(mixtral(), 1.0)
    copied = copy.deepcopy(hf.balance(mixtral(), 1.0))
    for model, call in ((again, again), (compiled, torch.compile(compiled, backend="aot_eager")), (copied, copied)):
        call(IDS, labels=IDS).loss.backward()
        torch.testing.assert_close(gate_gradients(model), wanted, rtol=1e-4, atol=1e-7)


def test_autocast_computes_it_in_float32() -> None:
    model = hf.balance(mixtral(), 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        value = model(IDS, labels=IDS).aux_loss
    assert value.dtype == torch.float32
    assert float(value.detach()) == pytest.approx(by_hand(model, IDS), abs=3e-2)


def router_step(make: Any, micro: int, coefficient: float) -> Tensor:
    """The step of the gates in a loop with accumulation over `micro` micro-batches, on 8 equal rows, in float64."""
    model = make().double()
    model.set_experts_implementation("eager")
    if coefficient:
        hf.balance(model, coefficient)
    before = [gate.weight.detach().clone() for gate in gates(model)]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for rows in IDS[:1].expand(8, -1).chunk(micro):
        (model(rows, labels=rows).loss / micro).backward()
    optimizer.step()
    return torch.cat([(gate.weight.detach() - old).flatten() for gate, old in zip(gates(model), before, strict=True)])


def test_accumulation_changes_nothing() -> None:
    once, *others = (router_step(mixtral, micro, 1.0) - router_step(mixtral, micro, 0.0) for micro in (1, 4, 8))
    assert once.norm() > 0.01
    for other in others:
        torch.testing.assert_close(other, once, rtol=1e-6, atol=1e-9)


def test_micro_batches_count_by_their_tokens_where_the_trainer_says_how_many_there_are() -> None:
    """Trainer hands num_items_in_batch over and does not divide by the accumulation."""
    model = hf.balance(mixtral(), 1.0)
    labels = IDS.clone()
    labels[0, 4:] = -100
    parts = [(IDS[:1], labels[:1]), (IDS[1:], labels[1:])]
    items = sum(int((part[:, 1:] != -100).sum()) for _, part in parts)
    plain = mixtral()
    total, wanted = 0.0, 0.0
    for ids, part in parts:
        total += float(model(ids, labels=part, num_items_in_batch=items).loss.detach())
        own = plain(ids, labels=part, num_items_in_batch=items).loss
        wanted += float(own.detach()) + by_hand(model, ids) * int((part[:, 1:] != -100).sum()) / items
    assert total == pytest.approx(wanted, abs=1e-5)


def test_a_loss_of_your_own_takes_it_by_add_losses_or_is_refused() -> None:
    wanted = hf.balance(mixtral(), 1.0)
    wanted(IDS, labels=IDS).loss.backward()
    model = hf.balance(mixtral(), 1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    logits = model(IDS).logits
    own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    pointsman.add_losses(own, model).backward()
    optimizer.step()
    torch.testing.assert_close(gate_gradients(model), gate_gradients(wanted), rtol=1e-4, atol=1e-7)
    model(IDS).logits.sum().backward()
    with pytest.raises(ValueError, match="its loss gave no gradient"):
        optimizer.step()


def test_a_loop_that_adds_aux_loss_itself_keeps_nothing() -> None:
    model = hf.balance(mixtral(), 1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    outputs = model(IDS)
    (outputs.logits.mean() + outputs.aux_loss).backward()
    optimizer.step()
    assert not model.pointsman_watched.pending


@pytest.mark.parametrize("given", [{}, {"labels": None}])
def test_a_tuple_without_a_loss_stays_as_it_is(given: Any) -> None:
    model = hf.balance(mixtral(), 1.0)
    torch.testing.assert_close(model(IDS, return_dict=False, **given)[0], mixtral()(IDS).logits)
    assert float(pointsman.add_losses(torch.zeros(()), model).detach()) == pytest.approx(by_hand(model, IDS), abs=1e-5)


def test_labels_may_be_given_by_place() -> None:
    model, before = hf.balance(mixtral(), 1.0), (None,) * 4
    wanted = model(IDS, labels=IDS, num_items_in_batch=22).loss
    torch.testing.assert_close(model(IDS, *before, IDS, return_dict=False, num_items_in_batch=22)[0], wanted)


@pytest.mark.parametrize("kind", [MixtralForSequenceClassification, MixtralForTokenClassification])
def test_a_classifier_that_ignores_the_number_of_items_adds_the_whole_loss(kind: Any) -> None:
    plain = kind(mixtral(num_labels=3, pad_token_id=0, classifier_dropout=0.0).config).train()
    tokens = kind is MixtralForTokenClassification
    model, labels = hf.balance(copy.deepcopy(plain), 1.0), IDS % 3 if tokens else torch.arange(4) % 3
    added = [model(IDS, labels=labels, **items).loss for items in ({}, {"num_items_in_batch": 16})]
    assert float((added[0] - plain(IDS, labels=labels).loss).detach()) > 0.5
    torch.testing.assert_close(*added)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_class_that_ignores_the_number_of_items_adds_the_whole_loss(sharded: bool) -> None:
    plain = zoo.tiny_model("switch_transformers").train()
    plain.config.decoder_start_token_id = 0
    model = hf.balance(plain, 1.0)
    if sharded:  # as torch's fully_shard calls it
        model.__class__ = type(f"FSDP{type(model).__name__}", (type(model),), {})
    added = []
    for items in ({}, {"num_items_in_batch": 64}):
        torch.manual_seed(0)  # its gates draw, and so does its dropout
        added.append(model(IDS, labels=IDS, **items).loss)
    torch.testing.assert_close(*added)


@pytest.mark.parametrize("how", ["loss", "bias"])
def test_what_waits_for_a_step_is_no_copys(how: Any, tmp_path: Path) -> None:
    model = hf.balance(deepseek(), how=how)
    model(IDS)
    torch.save(model, tmp_path / "model.pt")
    copied = copy.deepcopy(model).pointsman_watched
    assert not copied.pending
    assert not copied.counts
    assert model.pointsman_watched.counts if how == "bias" else model.pointsman_watched.pending


def test_a_copy_after_a_forward_that_ended_in_an_error() -> None:
    model = hf.balance(mixtral(), 1.0)
    model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(IDS, labels=IDS)
    copied = copy.deepcopy(model)
    for one in (model, copied):
        one.model.layers[1]._forward_pre_hooks.clear()
    torch.testing.assert_close(copied(IDS, labels=IDS).loss, model(IDS, labels=IDS).loss)


def test_add_losses_takes_those_of_both_kinds_of_layers() -> None:
    model, layer = hf.balance(mixtral(), 1.0), pointsman.MoE(64, 16, 4, router="smoe:balance=0.5")
    mixed = torch.nn.ModuleList([model, layer])
    optimizer = torch.optim.SGD(mixed.parameters(), 0.1)
    outputs = layer(model(IDS).logits)
    loss = pointsman.add_losses(torch.zeros(()), mixed)
    own = sum(value for losses in pointsman.losses(mixed).values() for value in losses.values())
    assert float(loss.detach()) == pytest.approx(by_hand(model, IDS) + float(own), abs=1e-5)
    (outputs.square().mean() + loss).backward()
    optimizer.step()


def test_a_correction_bias_that_is_a_parameter_becomes_a_buffer_of_its_name(tmp_path: Path) -> None:
    """`fully_shard` divides parameters."""
    model, plain = zoo.tiny_model("ernie4_5_moe").train(), zoo.tiny_model("ernie4_5_moe")
    hf.balance(model, 0.25, how="bias")
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert not [name for name, _ in model.named_parameters() if "e_score_correction_bias" in name]
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(IDS).logits, model.eval()(IDS).logits)
    biases = [bias for name, bias in loaded.named_parameters() if "e_score_correction_bias" in name]
    assert biases
    assert all(bias.abs().max() == 0.25 for bias in biases)


def test_a_sharded_model_is_refused_before_it_fails(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = fully_shard(mixtral(), mesh=init_device_mesh("cpu", (1,)))
        for attempt in (
            hf.balance,
            pointsman.record_routing,
            RoutingMonitor,
            lambda model: pointsman.set_top_k(model, 1).__enter__(),
            lambda model: pointsman.replay_routing(model, {}),
        ):
            with pytest.raises(ValueError, match=r"in shards: call this before fully_shard"):
                attempt(model)
    finally:
        torch.distributed.destroy_process_group()


def test_a_gate_of_two_blocks_is_refused_where_each_needs_its_own() -> None:
    model = deepseek()
    model.model.layers[1].mlp.gate = model.model.layers[0].mlp.gate
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate: it is the gate of another block as well"):
        hf.balance(model, how="bias")
    with pytest.raises(ValueError, match="record_routing: blocks share a gate"):
        pointsman.record_routing(model)


def test_the_loss_of_a_shared_gate_is_the_mean_of_its_calls() -> None:
    model, again = deepseek(), deepseek()
    for one in (model, again):
        one.model.layers[1].mlp.gate.load_state_dict(one.model.layers[0].mlp.gate.state_dict())
    model.model.layers[1].mlp.gate = model.model.layers[0].mlp.gate
    losses = [float(hf.balance(one, 1.0)(IDS, labels=IDS).loss.detach()) for one in (model, again)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize("checkpointed", [None, False, True])
@pytest.mark.parametrize("how", ["loss", "bias"])
def test_a_loop_that_calls_an_inner_model_is_refused(how: Any, checkpointed: bool | None) -> None:
    model = hf.balance(deepseek(), how=how)
    if checkpointed is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointed})
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    hidden = model.model(IDS, use_cache=False).last_hidden_state
    torch.nn.functional.cross_entropy(model.lm_head(hidden)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    with pytest.raises(ValueError, match="only a model inside DeepseekV3ForCausalLM ran"):
        optimizer.step()
    if checkpointed:
        return
    for _ in range(2):  # beside the whole it may run, and for evaluation
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        model.model(IDS, use_cache=False).last_hidden_state.mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.model(IDS)
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "copied"), [("deepseek_v3", "deepcopy"), ("deepseek_v3", "pickle"), ("mixtral", "deepcopy")]
)
def test_the_bias_of_a_copy_moves(kind: str, copied: str, tmp_path: Path) -> None:
    model = hf.balance(zoo.tiny_model(kind).train(), 0.25, how="bias")
    again = copy.deepcopy(model)
    if copied == "pickle":
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
    biases = [list(one.tensors(home)) for home in (model, again) for one in home.pointsman_balancing.biases]
    again(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(again.parameters(), 0.0).step()
    moved = [bool(bias.any()) for pair in biases for bias in pair]
    assert moved == [False] * (len(moved) // 2) + [True] * (len(moved) // 2)


def test_a_bias_that_no_optimizer_of_torch_moves_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["pointsman.hf.balance"], "PATIENCE", 3)
    caplog.set_level(logging.WARNING, "pointsman.hf")
    model = hf.balance(zoo.tiny_model("deepseek_v3").train(), 0.25, how="bias")
    biases = [bias for one in model.pointsman_balancing.biases for bias in one.tensors(model)]
    for steps in (True, False):
        caplog.clear()
        for _ in range(7):
            model(IDS, labels=IDS).loss.backward()
            if steps:
                hf.StepEnd().on_step_end(None, None, None, model)
        assert all(bias.any() for bias in biases)
        told = [one for one in caplog.messages if "no optimizer of torch stepped its parameters" in one]
        assert len(told) == (not steps)


def test_the_bias_moves_after_a_backward_in_which_optimizers_step() -> None:
    """Optimizers of single parameters step in the backward; checkpointing has yet to choose experts as before."""
    found = []
    for inside in (False, True):
        model = hf.balance(zoo.tiny_model("deepseek_v3").train(), 8.0, how="bias")  # other experts after one step
        model.activation_checkpointing_enable({"use_reentrant": False})
        one = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}
        for parameter in model.parameters() if inside else ():
            parameter.register_post_accumulate_grad_hook(lambda parameter, one=one: one[parameter].step())
        model(IDS, labels=IDS).loss.backward()
        for optimizer in () if inside else one.values():
            optimizer.step()
        found.append({**model.state_dict()})
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_a_loss_function_for_trainer_counts_it_by_the_share_of_tokens() -> None:
    """The one on the page: Trainer divides by the tokens of the step, and what the function returns by nothing."""
    page = (Path(__file__).parents[3] / "docs" / "own-training-loop.md").read_text(encoding="utf-8")
    code = page[page.index("def compute_loss(") :].partition("\n\n")[0]
    wanted, model = hf.balance(mixtral(), 1.0), hf.balance(mixtral(), 1.0)
    scope: dict[str, Any] = {"torch": torch, "pointsman": pointsman, "model": model}
    exec(code, scope)
    labels = IDS.clone()
    labels[0, 4:] = -100
    items = (labels[:, 1:] != -100).sum()
    for part in (slice(0, 1), slice(1, 4)):
        wanted(IDS[part], labels=labels[part], num_items_in_batch=items).loss.backward()
        scope["compute_loss"](model(IDS[part]), labels[part], num_items_in_batch=items).backward()
    torch.testing.assert_close(gate_gradients(model), gate_gradients(wanted), rtol=1e-4, atol=1e-7)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="no gate next to experts"):
        hf.balance(zoo.tiny_model("llama"))
    with pytest.raises(ValueError, match="'bias'"):
        hf.balance(mixtral(), how="bais")
    with pytest.raises(ValueError, match="numbers above 0"):
        hf.balance(mixtral(), -1.0)
    with pytest.raises(ValueError, match="like='megatron'"):
        hf.balance(mixtral(), like="megatron")
    with pytest.raises(ValueError, match="no correction bias"):
        hf.balance(zoo.tiny_model("gemma4"), how="bias")
    with pytest.raises(ValueError, match="has no MoE layer in it; of transformers"):
        pointsman.add_losses(torch.zeros(()), mixtral())


def deepseek() -> Any:
    return zoo.tiny_model("deepseek_v3").train()


def test_the_bias_moves_once_a_step_by_what_all_micro_batches_chose() -> None:
    model = hf.balance(deepseek(), how="bias")
    plain = deepseek()
    assert model.state_dict().keys() == plain.state_dict().keys()
    biases = [layer.mlp.gate.e_score_correction_bias for layer in model.model.layers]
    counts = [torch.zeros(8) for _ in biases]

    def counting(place: int) -> Any:
        def hook(gate: Any, args: Any, output: Any) -> None:
            if gate.training:
                counts[place] += torch.bincount(output[-1].flatten(), minlength=8)

        return hook

    hooks = [layer.mlp.gate.register_forward_hook(counting(place)) for place, layer in enumerate(model.model.layers)]
    before = [bias.clone() for bias in biases]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        assert all(torch.equal(bias, old) for bias, old in zip(biases, before, strict=True))
    with torch.no_grad():
        for _ in range(3):
            model.eval()(IDS)
    model.train()
    for hook in hooks:
        hook.remove()
    optimizer.step()
    for bias, old, count in zip(biases, before, counts, strict=True):
        torch.testing.assert_close(bias, old + 1e-3 * torch.sign(count.mean() - count))
    kept = [bias.clone() for bias in biases]
    optimizer.step()  # no training forward since
    assert all(torch.equal(bias, old) for bias, old in zip(biases, kept, strict=True))


def test_an_added_bias_moves_by_real_tokens_and_by_the_coefficient_of_the_last_call() -> None:
    model = mixtral()
    hf.balance(model, how="bias")
    hf.balance(model, 0.25, how="bias")
    mask = torch.ones_like(IDS)
    mask[:2, 2:] = 0  # left are 28 of 48 tokens
    with pointsman.record_routing(model) as records:
        model(IDS, attention_mask=mask, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    hf.StepEnd().on_step_end(None, None, None, model=model)  # the step is over already
    for gate, routing in zip(gates(model), records.values(), strict=True):
        real = torch.bincount(routing.experts[mask.flatten().bool()].flatten(), minlength=4)
        every = torch.bincount(routing.experts.flatten(), minlength=4)
        moved = [0.25 * torch.sign(counts.float().mean() - counts) for counts in (real, every)]
        torch.testing.assert_close(gate.pointsman.select.bias, moved[0])
        assert not torch.equal(*moved)


def test_an_added_bias_moves_again_once_its_router_is_thawed() -> None:
    model = hf.balance(mixtral(), how="bias")
    optimizer, moves = torch.optim.SGD(model.parameters(), 0.1), []
    for thaw in (False, True):
        pointsman.freeze(model, "router")
        if thaw:
            for gate in gates(model):
                gate.pointsman.requires_grad_(True)
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        moves.append([bool(gate.pointsman.select.bias.any()) for gate in gates(model)])
    assert moves == [[False] * len(gates(model)), [True] * len(gates(model))]


def test_a_bias_moves_in_float32_after_a_cast_of_the_model() -> None:
    model = hf.balance(deepseek(), how="bias").to(torch.bfloat16)
    biases = [layer.mlp.gate.e_score_correction_bias for layer in model.model.layers]
    before = [bias.fill_(0.5).float() for bias in biases]
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    for layer, old in zip(model.model.layers, before, strict=True):
        moves = ((layer.mlp.gate.e_score_correction_bias - old) / 1e-3).round(decimals=2)
        assert set(moves.tolist()) <= {-1.0, 0.0, 1.0}
        assert moves.any()


@pytest.mark.parametrize(("update", "told"), [("smebu", "a rule of its own"), ("none", "stays")])
def test_another_rule_of_loss_free_is_its_routers_own(update: str, told: str) -> None:
    model = hf.replace_routers(mixtral(), f"loss-free:update={update}")
    hf.balance(model, 0.25, how="bias")
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    for gate in gates(model):
        bias = gate.pointsman.select.bias
        assert bool(bias.any()) == (update == "smebu"), told
        assert float(bias.abs().max()) < 0.1, told


@pytest.mark.parametrize("how", ["loss", "bias"])
def test_it_saves_and_loads_with_the_model(how: Any, tmp_path: Path) -> None:
    model = hf.balance(mixtral(), how=how)
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(IDS).logits, model.eval()(IDS).logits)
    keys = {key for key in model.state_dict() if "pointsman" in key}
    assert bool(keys) == (how == "bias")  # Mixtral has no bias of its own: loss-free routers have


def test_it_says_in_one_line_what_it_changed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pointsman.hf"):
        hf.balance(mixtral(output_router_logits=True))
    said = (
        "2 gates, the balance loss per layer, times 0.01, is added to its loss; the class's own loss was on and is off"
    )
    assert caplog.messages == [f"balance: MixtralForCausalLM: {said}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.moe_modules())
def test_every_class_that_the_audit_knows(name: str) -> None:
    """Each gate gets the gradient of its own loss: that of E sum_i f_i P_i from what it returned."""
    if name in ("doge", "vitpose_backbone", "glm5_next"):
        pytest.skip("no gate; or the class itself does not train in this version")
    model = hf.balance(zoo.tiny_model(name).train(), 1.0)
    inputs = {"input_ids": IDS}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = IDS
    with torch.enable_grad():
        outputs = model(**inputs)
    value = pointsman.add_losses(torch.zeros(()), model)
    assert 0.99 < float(value.detach()) < 2
    value.backward()
    ran = [place for place in model.pointsman_balancing.places if any(
        p.grad is not None and bool(p.grad.any()) for p in model.get_submodule(place.path).parameters()
    )]  # fmt: skip
    assert len(ran) >= len(model.pointsman_balancing.places) // (2 if name == "ernie4_5_vl_moe" else 1)
    del outputs


def test_deepseek_has_nothing_new_in_its_configuration_but_the_coefficient(tmp_path: Path) -> None:
    model = hf.balance(deepseek())
    new = {key for key in model.config.to_dict() if key not in DeepseekV3Config().to_dict()}
    assert new <= {"router_aux_loss_coef", "output_router_logits"}


def steps_of_trainer(folder: Path, whose: str, ranks: int) -> dict[str, Tensor]:
    """What `trainer_step.py` finds on this many processes over gloo."""
    root, out = Path(__file__).parents[3], folder / f"{whose}-{ranks}.pt"
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    shared = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(root)]), "OMP_NUM_THREADS": "1"}
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("trainer_step.py")), str(out), whose]
    started = [
        subprocess.Popen(
            command,
            env={**shared, **world, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})},
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in started:
            _, told = process.communicate(timeout=280)
            assert process.returncode == 0, told[-2000:]
    finally:
        for process in started:
            process.kill()
    found: dict[str, Tensor] = torch.load(out, weights_only=True)
    return found


@pytest.mark.slow
def test_trainer_takes_the_same_step_at_every_accumulation_and_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ours = {**steps_of_trainer(tmp_path, "ours", 1), **steps_of_trainer(tmp_path, "ours", 2)}
    first, *others = ours.values()
    assert first.norm() > 1e-3
    for step in others:
        torch.testing.assert_close(step, first, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_measurement_can_fail(tmp_path: Path) -> None:
    """transformers' own loss is multiplied by the accumulation, where the trainer divides by the number of tokens."""
    pytest.importorskip("accelerate")
    stock = steps_of_trainer(tmp_path, "stock", 1)
    once, four = (stock[f"1 ranks, accumulation {steps}, average True"].norm() for steps in (1, 4))
    assert float(four / once) == pytest.approx(4, rel=1e-3)
