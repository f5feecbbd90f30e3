"""Each public bug put back turns its own line of `check_trainer` red, and no other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pointsman
from pointsman.testing.trainers.case import Batch, Setting, Trainer, world
from pointsman.testing.trainers.check import verdicts
from pointsman.testing.trainers.lines import LINES, judged
from pointsman_lab.checks.layers import Layer, Pointsman

QUICK = [line for line in LINES if line not in ("compiled", "ranks")]
"""The others take seconds."""


class NotDivided(Pointsman):
    """transformers' Trainer, NeMo Automodel#3359, trl#6083: the balance loss is not divided by the accumulation."""

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        for one in batches:
            main = model(**one).loss / len(batches)
            pointsman.add_losses(main, model).backward()


class DividedByTheRanks(Pointsman):
    """Megatron-LM#3768, #5007: tokens of all ranks divide the loss, and the mean over ranks does it again."""

    def spec(self, setting: Setting) -> str:
        return super().spec(replace(setting, coefficient=setting.coefficient / world()))


class PaddingCounts(Pointsman):
    """transformers#28255: padding counts as tokens do."""

    def layer(self, setting: Setting, place: int) -> Layer:
        return Layer(super().layer(setting, place).moe, lambda moe, hidden, real: moe(hidden))


class FirstOfEachSequenceOnly(Pointsman):
    """A mask made of positions, for which a packed row is one sequence and a start of padding."""

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        masked = [
            {**one, "attention_mask": (one["position_ids"] > 0).long()} if "position_ids" in one else one
            for one in batches
        ]
        super().backward(model, masked, setting)


class TwiceUnderCheckpointing(Pointsman):
    """A loss that a second forward adds again."""

    def spec(self, setting: Setting) -> str:
        return super().spec(replace(setting, coefficient=setting.coefficient * (1 + setting.checkpointing)))


class LostUnderCompilation(Pointsman):
    """A hook on the gate that a compiled model does not run."""

    def spec(self, setting: Setting) -> str:
        return super().spec(replace(setting, coefficient=setting.coefficient * (not setting.compiled)))


class TimesK(Pointsman):
    """transformers' `load_balancing_loss_func`: k times as large as in Megatron-core."""

    def spec(self, setting: Setting) -> str:
        return super().spec(replace(setting, coefficient=setting.coefficient * setting.k))


class Opposite(Pointsman):
    """NeMo's sigmoid loss at k = 1: the other direction."""

    def spec(self, setting: Setting) -> str:
        return "smoe:bias=false:gate=sigmoid" + (f":balance={setting.coefficient}" if setting.coefficient else "")

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        for one in batches:
            main = model(**one).loss
            whole = pointsman.add_losses(main, model)
            (((1 - 2 * (setting.k == 1)) * (whole - main) + main) / len(batches)).backward()


class Pooled(Pointsman):
    """transformers#28255, #31464: the loads of all layers are added before f P."""

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        for one in batches:
            logits: list[Tensor] = []
            gates = [gate for gate, _ in self.gates(model)]
            hooks = [
                gate.register_forward_hook(lambda *seen, kept=logits: kept.append(seen[2].logits)) for gate in gates
            ]
            main = model(**one).loss
            for hook in hooks:
                hook.remove()
            pointsman.add_losses(torch.zeros(()), model)
            real = one.get("attention_mask", torch.ones_like(one["input_ids"])).flatten().bool()
            probs = torch.softmax(torch.cat([part[real] for part in logits[: setting.layers]]), -1)
            chosen = probs.topk(setting.k, -1).indices.flatten()
            share = torch.bincount(chosen, minlength=setting.experts) / len(chosen)
            loss = setting.coefficient * setting.experts * (share * probs.mean(0)).sum()
            ((main + loss) / len(batches)).backward()


class BiasEveryMicroBatch(Pointsman):
    """The bias moves in each micro-batch."""

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        for one in batches:
            (pointsman.add_losses(model(**one).loss, model) / len(batches)).backward()
            pointsman.step_end(model)

    def after_step(self, model: Any) -> None:
        pass


class BiasInEvaluation(Pointsman):
    """Evaluation is counted for the next move of the bias."""

    def evaluate(self, model: nn.Module, batches: Sequence[Batch], setting: Setting) -> None:
        self.backward(model, batches, setting)
        model.zero_grad()


class ExpertsTwice(Pointsman):
    """DeepSpeed#8475: the norm that gradients are clipped to counts experts otherwise than the rest."""

    def before_step(self, model: Any) -> None:
        self.model_ = model

    def train(self, model: nn.Module, steps: Sequence[Sequence[Batch]], setting: Setting) -> None:
        def counted_twice(parameters: Any, most: float) -> None:
            twice = [*parameters, *(one for name, one in model.named_parameters() if ".experts." in name)]
            norm = torch.stack([one.grad.norm() for one in twice if one.grad is not None]).norm()
            for one in model.parameters():
                if one.grad is not None:
                    one.grad.mul_(most / norm)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.utils, "clip_grad_norm_", counted_twice)
            super().train(model, steps, setting)


class FirstExpertsTrain(Pointsman):
    """An adapter whose weights reach the first experts only."""

    def before_step(self, model: Any) -> None:
        for one in self.experts(model):
            if one.grad is not None:
                one.grad[2:] = 0


class BiasNotSaved(Pointsman):
    """A checkpoint without the router's buffers."""

    def resumed(self, steps: Sequence[Sequence[Batch]], setting: Setting) -> tuple[nn.Module, nn.Module]:
        whole, first, second = (self.model(setting) for _ in range(3))
        self.train(whole, steps, setting)
        self.train(first, steps[:1], setting)
        second.load_state_dict(dict(first.named_parameters()), strict=False)
        self.train(second, steps[1:], setting)
        return whole, second


class ReplayEndsBeforeBackward(Pointsman):
    """The second forward of activation checkpointing chooses experts itself."""

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        for one in batches:
            loss = pointsman.add_losses(model(**one).loss, model)
            for gate, _ in self.gates(model):
                gate.replayed = None
            (loss / len(batches)).backward()


class RouterInBf16(Pointsman):
    """Logits rounded to bf16."""

    def layer(self, setting: Setting, place: int) -> Layer:
        layer = super().layer(setting, place)
        if setting.bf16:
            layer.moe.router.register_forward_hook(
                lambda module, args, out: replace(out, logits=out.logits.bfloat16(), probs=out.probs.bfloat16())
            )
        return layer


MUTANTS: dict[str, type[Trainer]] = {
    "accumulation": NotDivided,
    "padding": PaddingCounts,
    "packing": FirstOfEachSequenceOnly,
    "checkpointing": TwiceUnderCheckpointing,
    "top-k": TimesK,
    "per layer": Pooled,
    "bias once a step": BiasEveryMicroBatch,
    "bias in evaluation": BiasInEvaluation,
    "clip norm": ExpertsTwice,
    "experts train": FirstExpertsTrain,
    "resume": BiasNotSaved,
    "replay": ReplayEndsBeforeBackward,
    "router in float32": RouterInBf16,
}


@pytest.mark.parametrize("line", MUTANTS)
def test_a_bug_put_back_turns_its_line_red_and_no_other(line: str) -> None:
    trainer = MUTANTS[line]()
    found = {one: judged(one, trainer, Setting()) for one in QUICK}
    assert {name for name, verdict in found.items() if verdict.holds is False} == {line}, found


class NeverArrives(Pointsman):
    """NeMo Automodel#1408: the balance loss is computed and reaches no gradient."""

    def backward(self, model: Any, batches: Sequence[Batch], setting: Setting) -> None:
        for one in batches:
            main = model(**one).loss
            (main + (pointsman.add_losses(main, model) - main).detach()).div(len(batches)).backward()


def test_a_loss_that_reaches_no_gate_is_red_and_not_a_trainer_without_one() -> None:
    found = {one: judged(one, NeverArrives(), Setting()) for one in QUICK}
    asked = {"accumulation", "padding", "packing", "checkpointing", "top-k", "per layer"}
    assert {name for name, verdict in found.items() if verdict.holds is False} == asked, found
    assert "reaches no gate" in found["accumulation"].told


def test_the_opposite_direction_is_red_at_its_k() -> None:
    found = judged("top-k", Opposite(), Setting())
    assert found.holds is False
    assert "cosine" in found.told


def test_our_layers_hold_every_line() -> None:
    found = [judged(line, Pointsman(), Setting()) for line in QUICK]
    assert [one for one in found if not one.holds] == []


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [Pointsman, LostUnderCompilation])
def test_compilation(mutant: type[Trainer]) -> None:
    assert judged("compiled", mutant(), Setting()).holds == (mutant is Pointsman)


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "told"), [(Pointsman, "x 1"), (DividedByTheRanks, "x 0.5")])
def test_two_processes(mutant: type[Trainer], told: str) -> None:
    found = next(iter(verdicts(f"{__file__}:{mutant.__name__}", lines=["ranks"])))
    assert (found.holds, found.told) == (mutant is Pointsman, f"{told} on 2 processes")
