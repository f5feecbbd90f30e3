"""Fine-tuning a run: what trains, what stays, what is saved, and what goes on after an interruption."""

import itertools
import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pointsman._errors import RunError
from pointsman.control import set_top_k
from pointsman.recording import record_routing
from pointsman_lab.cli.main import main
from pointsman_lab.data.task_streams import Encoded
from pointsman_lab.diagnosis import diagnose_path
from pointsman_lab.evaluation.passes import PLAIN
from pointsman_lab.finetuning import Finetuning, finetune, open_run
from pointsman_lab.finetuning.consistency import finetunings_of
from pointsman_lab.finetuning.run import finetuned_task, identity
from pointsman_lab.finetuning.task import change_from
from pointsman_lab.models.classifier import Classifier
from pointsman_lab.recipes import preset
from pointsman_lab.registry import preset_config
from pointsman_lab.report.commands import command
from pointsman_lab.report.task_table import routing_of
from pointsman_lab.runs.checkpoints import last_checkpoint
from pointsman_lab.runs.comparison import read
from pointsman_lab.runs.paths import finetuned_path
from pointsman_lab.runs.record import read_run
from pointsman_lab.training.checkpoint import checkpoint_tensors
from pointsman_lab.training.directory import RunDirectory
from pointsman_lab.training.run import load_run
from pointsman_lab.training.state import Interrupted
from pointsman_lab.training.trainer import train
from tests.lab.report.fixtures import write_finetuning

FAST = {"learning_rate": 5e-3, "batch_size": 8, "log_every": 1}


def weights(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = last_checkpoint(path / "checkpoints", print)
    assert checkpoint is not None
    return checkpoint_tensors(checkpoint, "model")


class Notes:
    """A display that keeps what it is told, and a stop that is set after some steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.notes: list[str] = []
        self.stop_after = stop_after
        self.done = 0

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self.name = name

    def advance(self, done: int, figures: Any) -> None:
        self.done = done if self.name == "train" else self.done

    def note(self, message: str) -> None:
        self.notes.append(message)

    def is_set(self) -> bool:
        return self.stop_after is not None and self.done >= self.stop_after


def test_the_papers_settings_are_the_defaults(task: str) -> None:
    from pointsman_lab.tasks.classification.data import load_task

    loaded = load_task(task)
    pretrained = preset("tiny", router="smoe").with_vocabulary(50)
    config = Finetuning(task).config(pretrained, loaded, 3)
    assert (config.learning_rate, config.batch_size, config.segment_length, config.seed) == (1e-4, 16, 512, 3)
    assert config.steps == 3 * 10  # three epochs of 160 texts
    assert config.top_k_schedule(0) == config.top_k_schedule(29) == config.model.num_experts  # dense
    assert (config.weight_decay, config.betas) == (0.0, (0.9, 0.999))
    assert Finetuning(task, epochs=1.5).config(pretrained, loaded, 0).steps == 15
    assert Finetuning(task, train_top_k="2").config(pretrained, loaded, 0).top_k_schedule(5) == 2
    ours = pretrained.with_overrides({"gpu_kernels": "triton"})
    assert Finetuning(task).config(ours, loaded, 0).gpu_kernels == "triton"


def test_from_the_command_line_to_accuracies_at_every_k(
    run: Path, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["finetune", str(run), "--task", task, "--steps", "60", "--out", str(tmp_path / "out")]
    arguments += ["--set", "learning_rate=5e-3", "--set", "batch_size=8", "--device", "cpu"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "k=1" in shown
    assert "k=4" in shown
    record = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert [(row["split"], row["top_k"], row["metric"]) for row in record["results"]] == [
        ("test", 1, "accuracy"), ("test", 2, "accuracy"), ("test", 4, "accuracy"),
    ]  # fmt: skip
    assert record["results"][2]["value"] > 0.9  # the last word tells it
    assert record["results"][2]["examples"] == 40
    layers = record["change_from_pretrained"]["layers"]
    assert set(layers) == {"layers.0.moe", "layers.1.moe"}
    assert all(0 <= layer["top1"] <= 1 and layer["tokens"] > 0 for layer in layers.values())
    kinds = {row["kind"] for row in RunDirectory(tmp_path / "out").metrics()}
    assert {"train", "valid"} <= kinds
    assert command(read(tmp_path / "out")).startswith("pointsman finetune RUN --task ")
    shutil.copytree(run, tmp_path / "mine")
    shutil.copytree(tmp_path / "out", finetuned_path(tmp_path / "mine", Finetuning(task).variant, 0))
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command(read(finetuned_path(Path("mine"), Finetuning(task).variant, 0))))
    assert words[1:4] == ["finetune", "mine", "--task"]
    assert main([*words[1:], "--device", "cpu"]) == 0  # finished: with other settings it would be refused
    assert len(list((tmp_path / "mine" / "finetune").iterdir())) == 1
    before = (tmp_path / "out" / "evaluation.json").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "out" / "checkpoints")  # no longer needed
    assert main(arguments) == 0  # finished: nothing is done again
    assert (tmp_path / "out" / "evaluation.json").stat().st_mtime_ns == before


def test_an_evaluation_counts_each_text_alone_and_no_padding(run: Path, task: str, tmp_path: Path) -> None:
    finetune(run, Finetuning(task, steps=3, settings=FAST), out=tmp_path)
    saved = open_run(tmp_path)
    work: Any = finetuned_task(saved)
    [result] = work.evaluate(saved.model, saved.config, "test", [2], PLAIN)
    encoded, nats, load = work.encoded("test", saved.config.segment_length), [], torch.zeros(4)
    layer = [*result["routers"]][-1]
    for row, label in zip(encoded.rows, encoded.labels.tolist(), strict=True):
        with torch.no_grad(), set_top_k(saved.model.eval(), 2), record_routing(saved.model) as records:
            logits = saved.model(torch.from_numpy(row.astype("int64"))[None]).double()
        nats.append(torch.nn.functional.cross_entropy(logits[0], torch.tensor(label)).item())
        load += torch.bincount(records[layer].experts.flatten(), minlength=4)
    assert result["nats"] == pytest.approx(sum(nats) / len(nats), rel=1e-5)
    assert result["tokens"] == sum(map(len, encoded.rows))
    assert result["routers"][layer]["load"] == pytest.approx((load / load.sum()).tolist(), abs=1e-3)


def test_a_saved_classifier_is_opened_as_it_was(
    run: Path, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = finetune(run, Finetuning(task, steps=3, settings=FAST), out=tmp_path).evaluation
    saved = open_run(tmp_path)
    assert (saved.step, saved.finetuning["classes"]) == (3, ["neg", "pos"])
    assert main(["evaluate", str(tmp_path), "--top-k", "2", "--device", "cpu"]) == 0
    [file] = tmp_path.glob("evaluation-*-test.json")
    again = json.loads(file.read_text())
    assert again["results"][0]["nats"] == pytest.approx(record["results"][1]["nats"], rel=1e-6)
    found = diagnose_path(tmp_path)
    assert "groups" not in found
    assert found["protocol"]["tokens"] == record["results"][1]["tokens"]
    layers = found["layers"].values()
    assert all("group" not in layer and layer["jacobian"]["gradient"] is not None for layer in layers)
    assert open_run(run).finetuning == {}
    with pytest.raises(RunError, match="is a fine-tuned run: give the pre-trained one"):
        finetune(tmp_path, Finetuning(task))
    capsys.readouterr()
    for words in (["export", str(tmp_path)], ["generate", str(tmp_path), "--prompt", "a"]):
        assert main(words) == 2
        assert capsys.readouterr().err == f"pointsman: {tmp_path} is a fine-tuned run: give the pre-trained one\n"
    (tmp_path / "finetune.json").write_text("{")
    with pytest.raises(RunError, match=r"has no whole finetune\.json"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("freeze", "moves"),
    [
        (("router",), ("experts", "attention", "head")),
        (("experts",), ("router", "attention", "head")),
        (("router", "experts"), ("attention", "head")),
        ((), ("router", "experts", "attention", "head")),
    ],
)
def test_frozen_roles_stay_and_the_rest_moves(
    comparison: Path, task: str, tmp_path: Path, freeze: tuple[str, ...], moves: tuple[str, ...]
) -> None:
    run = comparison / "runs" / "xmoe" / "seed-0"
    finetune(run, Finetuning(task, steps=2, freeze=freeze, settings=FAST), out=tmp_path)
    before = load_run(run).model.state_dict()
    moved = set()
    for name, tensor in weights(tmp_path).items():
        role = next(
            (role for role in ("router", "experts", "head") if role in name), "attention" if "attention" in name else ""
        )
        if role == "head" or not torch.equal(tensor, before[name.removeprefix("backbone.")]):
            moved.add(role)
    assert moved & {"router", "experts", "attention", "head"} == set(moves)


def test_the_balance_loss_still_trains_what_lies_below_frozen_routers(
    comparison: Path, task: str, tmp_path: Path
) -> None:
    run = comparison / "runs" / "xmoe" / "seed-0"
    found = {}
    for balance in (0.0, 0.1):
        settings = Finetuning(
            task, steps=3, freeze=("router", "experts"), balance=balance, train_top_k="2", settings=FAST
        )
        finetune(run, settings, out=tmp_path / str(balance))
        found[balance] = weights(tmp_path / str(balance))
    name = "backbone.layers.0.attention.qkv.weight"
    assert not torch.equal(found[0.0][name], found[0.1][name])
    routers = [name for name in found[0.0] if "router" in name]
    assert routers
    assert all(torch.equal(found[0.0][name], found[0.1][name]) for name in routers)


def test_an_interrupted_fine_tuning_goes_on_bit_for_bit(run: Path, task: str, tmp_path: Path) -> None:
    settings = Finetuning(task, steps=9, settings={**FAST, "checkpoint_every": 3})
    finetune(run, settings, out=tmp_path / "whole")
    stop = Notes(stop_after=4)
    with pytest.raises(Interrupted):
        finetune(run, settings, out=tmp_path / "parts", progress=stop, stop=stop)
    assert RunDirectory(tmp_path / "parts").read_json("evaluation.json") is None
    display = Notes()
    result = finetune(run, settings, out=tmp_path / "parts", progress=display)
    assert any("goes on after step 4 of 9" in note for note in display.notes)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    record = RunDirectory(tmp_path / "whole").read_json("evaluation.json")
    assert record is not None
    assert result.evaluation["results"] == record["results"]


def test_seeds_differ_and_routers_start_alike(comparison: Path, task: str, tmp_path: Path) -> None:
    settings = Finetuning(task, steps=1, settings=FAST)
    losses = {}
    for router, seed in (("smoe", 0), ("smoe", 1), ("dense", 0)):
        out = tmp_path / f"{router}-{seed}"
        finetune(comparison / "runs" / router / "seed-0", settings, seed=seed, out=out)
        losses[router, seed] = RunDirectory(out).metrics("train")[0]["loss"]
    assert losses["smoe", 0] != losses["smoe", 1]
    heads = [open_run(tmp_path / name).config for name in ("smoe-0", "dense-0")]
    assert heads[0].seed == heads[1].seed


def test_a_router_that_draws_is_compared_on_the_same_draws() -> None:
    classifier = Classifier(preset_config("tiny", 20, num_layers=1, router="thor"), 2)
    texts = Encoded((np.arange(20, dtype=np.uint8), np.arange(9, dtype=np.uint8)), np.array([0, 1]), 0)
    change = change_from(classifier.backbone.state_dict(), classifier, texts)
    assert [layer["sets"] for layer in change["layers"].values()] == [0.0]


def test_from_scratch_starts_from_fresh_weights(run: Path, task: str, tmp_path: Path) -> None:
    settings = Finetuning(task, steps=1, from_scratch=True, settings={**FAST, "learning_rate": 1e-12})
    record = finetune(run, settings, out=tmp_path).evaluation
    assert "change_from_pretrained" not in record
    assert record["protocol"]["from_scratch"]
    name = "layers.0.attention.qkv.weight"
    trained, fresh = load_run(run).model.state_dict()[name], weights(tmp_path)[f"backbone.{name}"]
    assert not torch.allclose(trained, fresh, atol=1e-4)
    assert settings.variant.endswith(",from-scratch")


@pytest.mark.parametrize("router", ["dense-matched", "hash"])
def test_rows_without_a_balance_loss(router: str, run: Path, task: str, tmp_path: Path) -> None:
    config = RunDirectory(run).config().with_overrides({"model.router": router, "steps": 1})
    train(config, tmp_path)
    width = {"dense-matched": 2 * config.model.expert_width}.get(router, 0)
    settings = Finetuning(task, steps=1, train_top_k="1" if width else None, balance=0.5, settings=FAST)
    out, display = finetuned_path(tmp_path, settings.variant, 0), Notes()
    finetune(tmp_path, settings, out=out, progress=display)
    assert f"balance=0.5 has no effect: {router} has no balance loss to weigh" in display.notes
    assert (f"train_top_k=1 has no effect: {router} has no router" in display.notes) == bool(width)
    assert not width or len(weights(out)["backbone.layers.1.feed_forward.w_in"]) == width, "as in pre-training"
    assert "--balance 0.5" in (told := command(read(out)))
    assert "--task-top-k" not in told


def test_what_cannot_be(run: Path, task: str, tmp_path: Path) -> None:
    finetune(run, Finetuning(task, steps=2, settings=FAST), out=tmp_path)
    with pytest.raises(RunError, match=r"of another configuration: steps is 2 there, 3 here; .* move this folder away"):
        finetune(run, Finetuning(task, steps=3, settings=FAST), out=tmp_path)
    with pytest.raises(RunError, match="pooling is 'last' there, 'mean' here"):
        finetune(run, Finetuning(task, steps=2, pooling="mean", settings=FAST), out=tmp_path)
    for damage in ("", "{"):
        kept = (tmp_path / "finetune.json").read_text()
        (tmp_path / "finetune.json").write_text(damage)
        with pytest.raises(RunError, match=r"has no whole finetune\.json"):
            finetune(run, Finetuning(task, steps=2, settings=FAST), out=tmp_path)
        (tmp_path / "finetune.json").write_text(kept)
    about = json.loads((tmp_path / "finetune.json").read_text())
    about["pretrained"]["sha256"] = "0"
    (tmp_path / "finetune.json").write_text(json.dumps(about))
    with pytest.raises(RunError, match="fine-tuned from other weights"):
        finetune(run, Finetuning(task, steps=2, settings=FAST), out=tmp_path)


def test_only_language_models_classify_texts() -> None:
    for family in ("encoder", "of-another-package"):
        config: Any = SimpleNamespace(model=SimpleNamespace(family=family))
        with pytest.raises(RunError, match=f"'{family}' do not learn the task sst2; allowed are transformer-xl, dec"):
            Finetuning("sst2").check(config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--freeze", "routr"], "did you mean 'router'"),
        (["--balance", "-1"], "allowed are numbers from 0"),
        (["--pooling", "middle"], "allowed: first, last, mean"),
        (["--steps", "2", "--epochs", "1"], "exclude each other"),
        (["--task-top-k", "9"], "k=9 is outside 1 to 4"),
        (["--set", "learning_rat=1"], "did you mean 'learning_rate'"),
        (["--set", "model.dim=64"], "the model is that of the pre-trained run"),
        (["--length", "1"], "whole numbers from 2"),
        (["--task", "sst3"], "did you mean"),
        (["--task", "gone.csv"], "there is no file or folder gone.csv"),
        (["--seed", "1"], "did you mean '--seeds'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    run: Path, task: str, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["finetune", str(run), "--device", "cpu", "--out", str(tmp_path)]
    assert main([*arguments, *([] if "--task" in words else ["--task", task]), *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pointsman")]
    assert len(lines) == 1
    assert message in lines[0]


def test_a_run_is_needed(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", str(tmp_path), "--task", task]) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert main(["finetune", str(tmp_path)]) == 2
    assert "--task is missing" in capsys.readouterr().err


def test_cut_texts_are_said_and_recorded(run: Path, task: str, tmp_path: Path) -> None:
    display = Notes()
    record = finetune(
        run, Finetuning(task, steps=1, length=12, settings=FAST), out=tmp_path, progress=display
    ).evaluation
    cut = record["protocol"]["truncated"]
    assert 0 < cut["test"] < 40
    assert any(f"test: {cut['test']} of 40 texts cut to 12 tokens" in note for note in display.notes)


def test_bytes_that_the_run_has_never_read_are_counted(run: Path, tmp_path: Path) -> None:
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.csv").write_text("text,label\n" + "the film was Z?,pos\nthe film was bad,neg\n" * 30)
    display = Notes()
    finetune(run, Finetuning(str(tmp_path), steps=1, settings=FAST), out=tmp_path / "o", progress=display)
    assert any("train: 60 tokens of the texts are not in the run's vocabulary" in note for note in display.notes)


def test_fine_tunings_from_scratch_have_no_consistency(tmp_path: Path) -> None:
    for seed, variant in itertools.product((0, 1), ("sst2", "sst2,from-scratch", "sst2,from-scratch,finetune-xmoe")):
        write_finetuning(tmp_path, variant, "smoe", seed, metric=0.7)
    assert list(finetunings_of(tmp_path)) == ["sst2"]


def test_inter_run_consistency_of_fine_tunings(run: Path, task: str, tmp_path: Path) -> None:
    runs = [
        read_run(finetune(run, Finetuning(task, steps=2, settings=FAST), seed=seed, out=tmp_path / str(seed)).out)
        for seed in range(2)
    ]
    found = routing_of(runs)
    assert found["consistency"] is not None
    assert 0.5 < found["consistency"] <= 1  # two steps from the same weights
    assert found["top1"] is not None
    assert found["sets"] is not None
    assert routing_of(runs[:1])["consistency"] is None


def test_names_of_folders(run: Path) -> None:
    settings = Finetuning("a/b.csv:label=x", freeze=("router", "experts"), balance=0.01, train_top_k="N/2:N")
    assert (
        finetuned_path(run, settings.variant, 3)
        == run / "finetune" / "b.csv,k=N_2-N,freeze=router+experts,balance=0.01/seed-3"
    )


def test_a_budget_of_tokens_scores_the_same_texts_of_every_model(run: Path, task: str, tmp_path: Path) -> None:
    settings = Finetuning(task, steps=1, settings={**FAST, "eval_tokens": 300})
    record = finetune(run, settings, out=tmp_path / "some").evaluation
    scored = record["results"][0]["examples"]
    assert record["results"][0]["tokens"] <= 300
    assert 5 < scored < 40
    assert record["protocol"]["scored"] == f"{scored} of 40 texts, drawn with a fixed seed"
    again = finetune(run, settings, seed=1, out=tmp_path / "other").evaluation
    assert [row["tokens"] for row in again["results"]] == [row["tokens"] for row in record["results"]]
    everything = finetune(run, Finetuning(task, steps=1, settings=FAST), out=tmp_path / "some").evaluation
    assert everything["results"][0]["examples"] == 40  # evaluated anew, not trained anew
    assert "scored" not in everything["protocol"]


def test_settings_that_do_not_fit_leave_nothing_behind(run: Path, task: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="did you mean 'router'"):
        finetune(run, Finetuning(task, steps=1, freeze=("rooter",), settings=FAST), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_out_may_be_of_few_parts(
    run: Path, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", str(run), "--task", task, "--steps", "1", "--out", "ft", "--device", "cpu"]) == 0
    assert "k=4" in capsys.readouterr().out


@pytest.mark.parametrize("link", ["finetune", "finetune/VARIANT/seed-0/.lock", "checkpoints", "config.json"])
def test_a_run_of_somebody_else_opens_nothing_through_its_links(
    run: Path, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], link: str
) -> None:
    copy, mine = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(run, copy)
    place = copy / link.replace("VARIANT", Finetuning(task).variant)
    if place.suffix == ".json" or place.name == ".lock":
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        mine.write_text("mine")
    else:
        shutil.rmtree(place, ignore_errors=True)
        mine.mkdir()
    place.symlink_to(mine)
    assert main(["finetune", str(copy), "--task", task, "--steps", "1", "--device", "cpu"]) == 2
    assert "a link" in capsys.readouterr().err
    assert mine.read_text() == "mine" if mine.is_file() else not list(mine.iterdir())


def test_weights_that_many_ranks_wrote_have_an_identity(tmp_path: Path) -> None:
    def told(**files: str) -> str:
        folder = tmp_path / "checkpoints/step-7"
        folder.mkdir(parents=True, exist_ok=True)
        named = {name.replace("__", "/"): {"bytes": 1, "sha256": sha} for name, sha in files.items()}
        (folder / "manifest.json").write_text(json.dumps({"files": named}))
        return identity(SimpleNamespace(path=tmp_path, step=7))["sha256"]  # type: ignore[arg-type]

    assert told(**{"model.safetensors": "ab", "state.json": "y"}) == "ab"
    parts = {"model__shard-1.safetensors": "ab", "model__shard-2.safetensors": "cd"}
    assert told(**parts) == told(**parts, trainer__x="z") != told(**{**parts, "model__shard-2.safetensors": "ce"})
