"""Trainer, PEFT and pointsman's routers together."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import pointsman
from pointsman import hf
from pointsman.control import named_routers
from pointsman.hf.layouts import Kind, kind_of
from tests.library.hf import zoo
from tests.library.hf.test_replace import IDS, logits, spread

peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")


def rows(count: int = 32) -> list[dict[str, torch.Tensor]]:
    """Sequences that count on from a random start: easy to learn."""
    starts = torch.randint(0, 40, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    made = [torch.arange(start, start + 12) % 50 + 3 for start in starts]
    return [{"input_ids": row, "labels": row} for row in made]


def train(model: Any, folder: Path, steps: int = 12, resume: str | None = None, **settings: Any) -> list[float]:
    settings = {"learning_rate": 3e-3, "logging_steps": 1, "save_strategy": "no", **settings}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        dataloader_pin_memory=False,
        **settings,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(), callbacks=[hf.StepEnd()])
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [None, "hyperrouter", "xmoe+similarity"])
def test_trainer(five: str, spec: str | None, tmp_path: Path) -> None:
    model = spread(zoo.tiny_model(five)).train()
    model.config.output_router_logits = True
    if spec is not None:
        hf.replace_routers(model, spec)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".pointsman." in name}
    found = train(model, tmp_path)
    assert found[-1] < 0.9 * found[0]
    assert all(math.isfinite(loss) for loss in found)
    moved = [name for name, p in model.named_parameters() if name in before and not torch.equal(p, before[name])]
    assert len(moved) >= (0 if spec is None else 2)
    for _, router in named_routers(model):
        if spec == "xmoe+similarity":
            norms = router.score.score.expert_embeddings.norm(dim=-1)
            torch.testing.assert_close(norms.detach(), torch.full_like(norms, 0.1), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_trainer_checkpoint_resumes(name: str, tmp_path: Path) -> None:
    """Trainer itself cannot read the experts of classes that are saved under other names (Mixtral's, with any gate):
    such a checkpoint is opened with from_pretrained first."""
    whole = hf.replace_routers(spread(zoo.tiny_model(name)), "hyperrouter")
    train(whole, tmp_path / "whole", steps=6)
    half = hf.replace_routers(spread(zoo.tiny_model(name)), "hyperrouter")
    train(half, tmp_path / "half", steps=6, save_strategy="steps", save_steps=3)
    checkpoint = str(tmp_path / "half" / "checkpoint-3")
    if name == "mixtral":
        other = AutoModelForCausalLM.from_pretrained(checkpoint)
    else:
        other = hf.replace_routers(spread(zoo.tiny_model(name, seed=1)), "hyperrouter")
    train(other, tmp_path / "again", steps=6, resume=checkpoint)
    torch.testing.assert_close(logits(other.eval()), logits(whole.eval()), rtol=1e-4, atol=1e-5)


def test_trainer_with_gradient_checkpointing_and_accumulation(tmp_path: Path) -> None:
    found = []
    for checkpointed in (False, True):
        model = hf.replace_routers(spread(zoo.tiny_model("mixtral")), "hyperrouter+similarity").train()
        found.append(
            train(
                model,
                tmp_path / str(checkpointed),
                steps=3,
                gradient_accumulation_steps=2,
                activation_checkpointing=checkpointed,
                per_device_eval_batch_size=2,
            )
        )
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # asked by peft
@pytest.mark.parametrize("spec", ["hyperrouter", "smoe+similarity"])
def test_peft(spec: str, tmp_path: Path) -> None:
    base = hf.replace_routers(spread(zoo.tiny_model("mixtral")), spec)
    base.save_pretrained(tmp_path / "base")
    expected = logits(base)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["pointsman"])
    model = peft.get_peft_model(base, settings)
    torch.testing.assert_close(logits(model), expected)
    with pointsman.set_top_k(model, 1):
        assert not torch.allclose(logits(model), expected, atol=1e-6)
    train(model, tmp_path / "run", steps=4, learning_rate=0.05)
    trained = logits(model.eval())
    assert not torch.allclose(trained, expected, atol=1e-4)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any(".pointsman." in name for name in trainable)
    assert all("lora" in name or ".pointsman." in name for name in trainable)
    model.save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(fresh, str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(loaded), trained, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "glm4_moe", "minimax_m2", "inkling"])
def test_gates_that_cannot_be_probed_score_as_their_class_does(family: str) -> None:
    """Where PEFT trains the gate, or where its weights are offloaded."""

    def measured(model: Any) -> tuple[list[torch.Tensor], float]:
        with torch.no_grad(), pointsman.record_routing(model.eval()) as found:
            model(input_ids=IDS)
        loss = model.train()(input_ids=IDS, labels=IDS).loss
        return [routing.probs for routing in found.values()], float(loss.detach())

    def fresh() -> Any:
        return spread(zoo.tiny_model(family))

    probs, loss = measured(hf.balance(fresh(), 1.0))
    whole = peft.LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["gate"])
    low_rank = peft.LoraConfig(r=2, target_modules=["o_proj"], target_parameters=["gate.weight"])
    for model in (
        peft.get_peft_model(hf.balance(fresh(), 1.0), whole),
        hf.balance(peft.get_peft_model(fresh(), whole), 1.0),
        hf.balance(peft.get_peft_model(fresh(), low_rank), 1.0),
        hf.balance(accelerate.cpu_offload(fresh(), execution_device=torch.device("cpu")), 1.0),
    ):
        found, its = measured(model)
        torch.testing.assert_close(found, probs)
        assert its == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_the_scores_of_all_experts_are_read_from_those_of_the_chosen(name: Kind, k: int) -> None:
    logits = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    scores = torch.softmax(logits, -1) if name == "softmax" else torch.sigmoid(logits)
    weights, experts = scores.topk(k, dim=-1)
    assert kind_of(logits, 2.5 * weights.bfloat16(), experts) == name
    assert kind_of(logits, weights / weights.sum(-1, keepdim=True), experts) == (name if k > 1 else "other")
    assert kind_of(logits, torch.rand(16, k, generator=torch.Generator().manual_seed(1)), experts) == "other"
    assert kind_of(logits[:0], weights[:0], experts[:0]) == "other"


def test_step_end_warning_tells_what_to_do() -> None:
    model = hf.replace_routers(spread(zoo.tiny_model("mixtral")), "xmoe").train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="step_end"):
        model(IDS, labels=IDS)
