"""The best validation chooses weights, frozen parts stay, the best answers are kept, XTREME's own files and rules."""

import collections
import json
import random
import re
import shutil
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sentencepiece")

from safetensors.torch import load_file

from pointsman._errors import RunError
from pointsman_lab.cli.main import main
from pointsman_lab.data.pieces import train_pieces
from pointsman_lab.diagnosis import Settings, diagnose_path
from pointsman_lab.finetuning import Finetuning, finetune
from pointsman_lab.finetuning.run import open_run
from pointsman_lab.progress import Quiet
from pointsman_lab.report.commands import _finetune_command
from pointsman_lab.report.summary import summary
from pointsman_lab.runs.paths import finetuned_path
from pointsman_lab.runs.record import read_metrics, read_run
from pointsman_lab.tasks.crosslingual.data import load_xtreme
from pointsman_lab.tasks.crosslingual.evaluation import answer, features
from pointsman_lab.tasks.crosslingual.formats import Question
from pointsman_lab.tasks.crosslingual.xtreme import UPOS
from pointsman_lab.training.run import load_run
from pointsman_lab.training.state import Interrupted
from tests.tasks.crosslingual.fixtures import WORDS, pretrained, questions, sentence, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-trained X-MoE, whose router keeps the norms of its embeddings after each step."""
    return pretrained(data, tmp_path_factory.mktemp("runs") / "mlm", "xmoe")


@pytest.fixture(autouse=True)
def folder(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_DATA", str(data))


class StopAfter(Quiet):
    """Asks to stop after a step; is its own event."""

    def __init__(self, step: int) -> None:
        self.step, self.stopping = step, False

    def advance(self, done: int, values: Any) -> None:
        self.stopping |= values.get("step") == self.step

    def is_set(self) -> bool:
        return self.stopping


def choosing(**more: Any) -> Finetuning:
    values = {"batch_size": 8, "choose": "best-valid", "validate_every": 3, "checkpoint_every": 2,
              "learning_rate": 3e-2, "eval_top_k": "1"}  # fmt: skip
    return Finetuning("panx", steps=10, length=32, settings={**values, **more})


def test_the_best_english_validation_chooses_and_a_stopped_run_chooses_the_same(run: Path, tmp_path: Path) -> None:
    whole = finetune(run, choosing(), out=tmp_path / "whole")
    rows = [row for row in read_metrics(tmp_path / "whole/metrics.jsonl", "valid") if row["top_k"] == 1]
    assert [row["step"] for row in rows] == [3, 6, 9, 10]
    best = max(rows, key=lambda row: (row["value"], -row["step"]))
    assert whole.evaluation["chosen_step"] == best["step"]
    assert whole.evaluation["protocol"]["checkpoint_rule"] == "the best step on held-out rows of training"
    last = finetune(run, choosing(choose="last"), out=tmp_path / "last")
    assert "chosen_step" not in last.evaluation
    for stopped in (2, 3, 10):  # before and at a validation; the last step
        out, stop = tmp_path / f"stopped-{stopped}", StopAfter(stopped)
        with pytest.raises(Interrupted):
            finetune(run, choosing(), out=out, progress=stop, stop=stop)  # type: ignore[arg-type]
        found = finetune(run, choosing(), out=out)
        assert found.evaluation["chosen_step"] == whole.evaluation["chosen_step"]
        assert found.evaluation["results"] == whole.evaluation["results"]
        for name in (f"step-{best['step']}/model", "step-10/model", "step-10/trainer"):
            one, other = (load_file(each / f"checkpoints/{name}.safetensors") for each in (out, whole.out))
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
    chosen = open_run(tmp_path / "whole")
    assert chosen.step == best["step"] < 10
    kept = load_file(tmp_path / f"whole/checkpoints/step-{chosen.step}/model.safetensors")
    assert all(torch.equal(tensor, kept[name]) for name, tensor in chosen.model.state_dict().items() if name in kept)
    same = load_file(tmp_path / "last/checkpoints/step-10/model.safetensors")
    trained = load_file(tmp_path / "whole/checkpoints/step-10/model.safetensors")
    assert all(torch.equal(same[name], tensor) for name, tensor in trained.items())  # choosing changes no step


def test_the_command_of_a_fine_tuning_names_what_a_preset_freezes_no_more(run: Path) -> None:
    task = "panx:languages=en"
    settings = Finetuning(task, steps=1, length=32, preset="finetune-xmoe", freeze=("none",))
    out = finetune(run, settings, out=finetuned_path(run, settings.variant, 0)).out
    assert _finetune_command(read_run(out)) == (
        f"pointsman finetune {run.name} --task {task} --steps 1 --seeds 1 --task-preset finetune-xmoe --freeze none "
        "--length 32"
    )


def test_a_dense_run_has_nothing_that_a_preset_freezes(data: Path, tmp_path: Path) -> None:
    dense = pretrained(data, tmp_path / "mlm", "plain")
    settings = Finetuning("panx:languages=en", steps=1, length=32, preset="finetune-xmoe")
    out = finetune(dense, settings, out=finetuned_path(dense, settings.variant, 0)).out
    assert read_run(out).evaluation["protocol"]["frozen"] == []
    command = (
        "pointsman finetune mlm --task panx:languages=en --steps 1 --seeds 1 --task-preset finetune-xmoe --length 32"
    )
    assert _finetune_command(read_run(out)) == command
    with pytest.raises(RunError, match=r"freeze: no part .* 'experts'"):
        finetune(dense, replace(settings, freeze=("experts",)), out=tmp_path / "asked")


def test_a_run_whose_chosen_weights_are_lost_trains_them_again(run: Path, tmp_path: Path) -> None:
    whole, out, stop = finetune(run, choosing(), out=tmp_path / "whole"), tmp_path / "stopped", StopAfter(10)
    with pytest.raises(Interrupted):
        finetune(run, choosing(), out=out, progress=stop, stop=stop)  # type: ignore[arg-type]
    (out / f"checkpoints/step-{whole.evaluation['chosen_step']}/model.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"damaged: model.safetensors"):
        open_run(out)
    assert finetune(run, choosing(), out=out).evaluation["results"] == whole.evaluation["results"]


def test_a_run_whose_validations_are_lost_trains_again_and_is_opened_by_no_other_weights(
    run: Path, tmp_path: Path
) -> None:
    whole, out, stop = finetune(run, choosing(), out=tmp_path / "whole"), tmp_path / "stopped", StopAfter(10)
    with pytest.raises(Interrupted):
        finetune(run, choosing(), out=out, progress=stop, stop=stop)  # type: ignore[arg-type]
    best = f'"step": {whole.evaluation["chosen_step"]}, "top_k": 1,'
    for folder in (out, tmp_path / "whole"):
        text = (folder / "metrics.jsonl").read_text()
        assert best in text
        lines = [line for line in text.splitlines(keepends=True) if not ('"valid"' in line and best in line)]
        (folder / "metrics.jsonl").write_text("".join(lines))
    with pytest.raises(RunError, match=r"metrics\.jsonl has no validation of step \d at k = 1: nothing says which"):
        open_run(tmp_path / "whole")
    found = finetune(run, choosing(), out=out).evaluation
    assert found["chosen_step"] == whole.evaluation["chosen_step"]
    assert found["results"] == whole.evaluation["results"]


def test_pre_training_is_not_chosen(run: Path, data: Path, tmp_path: Path) -> None:
    from pointsman_lab.training.directory import RunDirectory
    from pointsman_lab.training.trainer import train

    config = RunDirectory(run).config().with_overrides({"choose": "best-valid", "validate_every": 1})
    with pytest.raises(RunError, match=r"choose=best-valid: it is for fine-tuning"):
        train(config, tmp_path / "run")
    with pytest.raises(RunError, match="best-valid"):
        config.with_overrides({"choose": "best"})


def test_what_is_frozen_stays_bit_by_bit(run: Path, tmp_path: Path) -> None:
    settings = Finetuning("panx", steps=3, length=32, freeze=("router", "experts"), settings={"batch_size": 8})
    found = finetune(run, settings, out=tmp_path / "tuned").evaluation["frozen"]
    assert found["roles"] == ["router", "experts"]
    assert found["tensors"] > 5
    assert found["changed"] == []
    before, after = load_run(run).model.state_dict(), open_run(tmp_path / "tuned").model.state_dict()
    names = [name for name in before if ".router." in name or ".experts." in name]
    assert len(names) >= found["tensors"]
    assert all(torch.equal(before[name], after[f"backbone.{name}"]) for name in names)


def test_a_router_with_one_k_is_tuned_and_its_validation_is_named_so(data: Path, tmp_path: Path) -> None:
    run = pretrained(data, tmp_path / "mlm", "soft", experts="ffn")
    settings = Finetuning("xnli-dev:languages=de", steps=1, length=32, settings={"batch_size": 8})
    record = finetune(run, settings, out=tmp_path / "tuned").evaluation
    change = record["change_from_pretrained"]
    assert (change["top_k"], [row["top_k"] for row in record["results"]]) == (4, [4])
    assert [(layer["tokens"] > 0, layer["sets"]) for layer in change["layers"].values()] == [(True, 0.0)]
    found = diagnose_path(tmp_path / "tuned", settings=Settings(tokens=200))
    assert [layer["agreement"] for layer in found["layers"].values()] == [[]]
    arguments = ["evaluate", str(tmp_path / "tuned"), "--split", "valid", "--predictions", "official"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    again = json.loads((tmp_path / "out/evaluation-xnli-dev-valid.json").read_text())
    assert again["protocol"]["split"] == again["results"][0]["split"] == "valid"
    [file] = (tmp_path / "out/predictions/xnli-dev").iterdir()
    assert file.name == "valid-en.tsv"
    assert len(file.read_text().splitlines()) == len(load_xtreme("xnli-dev", data).splits["valid"])


def test_the_consistency_of_fine_tunings_of_one_run_is_read(run: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(run, tmp_path / "mlm"))
    settings = {"batch_size": 8, "observe_every": 2, "eval_top_k": "1", "learning_rate": 3e-2}
    for freeze in ((), ("router", "experts")):
        for seed in range(3):
            finetune(own, Finetuning("panx", steps=8, length=32, freeze=freeze, settings=settings), seed=seed)
    found = diagnose_path(own, settings=Settings(tokens=500))
    free, frozen = (found["finetunings"][name] for name in ("panx", "panx,freeze=router+experts"))
    assert (free["runs"], free["window"]) == (3, 2)
    [layer] = free["layers"]
    assert [row["step"] for row in free["layers"][layer]] == [2, 4, 6, 8]
    rows = [list(read_metrics(own / f"finetune/panx/seed-{seed}/metrics.jsonl", "routing")) for seed in range(3)]
    loads = np.array([[np.array(row["load"]) * row["tokens"] for row in of][-1] for of in rows])
    rho = np.corrcoef(loads)
    last = free["layers"][layer][-1]
    assert last["with_diagonal"] == pytest.approx(rho.mean())
    assert last["without_diagonal"] == pytest.approx((rho.sum() - 3) / 6)
    assert frozen["layers"][layer][-1] != last
    assert "consistency of fine-tunings: panx,freeze=router+experts" in summary(found)
    seeds = [own / f"finetune/panx/seed-{seed}" for seed in range(3)]
    tuned = diagnose_path(seeds[0], seeds[1:], Settings(tokens=500))
    assert tuned["groups"] == ["en", "de"]
    [name] = tuned["layers"]
    assert tuned["consistency"][name]["runs"] == 3
    assert tuned["layers"][name]["group"]["corrected"] is not None
    with pytest.raises(RunError, match="leave --data out"):
        diagnose_path(seeds[0], settings=Settings(data="xnli"))


def official_answer(
    item: Question, logits: list[np.ndarray], offsets: list[np.ndarray], size: int = 20, longest: int = 30
) -> str:
    """`compute_predictions_logits` of the SQuAD scripts that XTREME runs, without its rule of the widest context."""
    Prelim = collections.namedtuple("Prelim", "window start end start_logit end_logit")
    prelim = []
    for window, (each, at) in enumerate(zip(logits, offsets, strict=True)):
        inside = [place for place in range(len(at)) if at[place, 0] >= 0]
        starts = sorted(inside, key=lambda i: each[0][i], reverse=True)[:size]
        ends = sorted(inside, key=lambda i: each[1][i], reverse=True)[:size]
        for start in starts:
            for end in ends:
                if end < start or end - start + 1 > longest:
                    continue
                prelim.append(Prelim(window, start, end, each[0][start], each[1][end]))
    prelim.sort(key=lambda x: x.start_logit + x.end_logit, reverse=True)
    first = prelim[0]
    at = offsets[first.window]
    return item.context[at[first.start, 0] : at[first.end, 1]].strip()


def test_the_best_answer_is_the_official_one() -> None:
    draw = random.Random(3)
    pieces = train_pieces([sentence(draw) + "." for _ in range(600)], 96)
    context = " ".join(draw.choices(WORDS[:12], k=90))  # few words: equal texts at several places
    item = Question("q", context, "ab cd", ((context.split()[0], 0),))
    made = features([item], pieces, 48, {})
    assert len(made.offsets) > 2
    for seed in range(5):
        logits = [np.random.default_rng((seed, n)).normal(size=(2, len(at))) for n, at in enumerate(made.offsets)]
        found = answer(item, list(zip(logits, made.offsets, strict=True)))
        assert found == official_answer(item, logits, list(made.offsets))


def test_xtremes_own_layout_and_its_scorers_rules(data: Path, run: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """`udpos/test-LANG.tsv`, `tydiqa/tydiqa-goldp-v1.1-dev/…`: XTREME's script reads and scores our predictions so."""
    seqeval = pytest.importorskip("seqeval.metrics")
    draw, root = random.Random(5), tmp_path / "download"
    (root / "udpos").mkdir(parents=True)
    for language in ("en", "fi"):
        for part, count in (("train", 60), ("test", 15)):
            lines: list[str] = []
            for _ in range(count if language == "en" or part == "test" else 0):
                lines += [f"{draw.choice(WORDS)}\t{draw.choice(UPOS[:5])}" for _ in range(draw.randint(1, 40))] + [""]
            (root / f"udpos/{part}-{language}.tsv").write_text("\n".join(lines) + "\n")
    for part, some in (("train", ["en"]), ("dev", ["en", "fi"])):
        folder = root / f"tydiqa/tydiqa-goldp-v1.1-{part}"
        folder.mkdir(parents=True)
        for language in some:
            count = 60 if part == "train" else 8
            questions(folder / f"tydiqa.goldp.{language}.{part}.json", f"{language}-{part}", count, draw)
    monkeypatch.setenv("POINTSMAN_DATA", str(root))
    settings = {"batch_size": 8, "eval_top_k": "1"}
    tags = finetune(run, Finetuning("udpos", steps=3, length=32, settings=settings), out=tmp_path / "tags")
    spans = finetune(run, Finetuning("tydiqa", steps=3, length=48, settings=settings), out=tmp_path / "spans")
    for language in ("en", "fi"):
        truth = [list(item.tags) for item in load_xtreme("udpos", root).tests[language]]  # type: ignore[union-attr]
        given = read_tag(tmp_path / f"tags/predictions/udpos/test-{language}.tsv")
        assert [len(one) for one in given] == [len(one) for one in truth]
        row = tags.evaluation["results"][0]["languages"][language]
        with pytest.warns(UserWarning, match="seems not to be NE tag"):
            expected = seqeval.f1_score(truth, given)
        assert row["f1_xtreme"] == pytest.approx(expected)
        right = sum(a == b for one, other in zip(truth, given, strict=True) for a, b in zip(one, other, strict=True))
        assert row["value"] == pytest.approx(right / sum(map(len, truth)))
        predictions = json.loads((tmp_path / f"spans/predictions/tydiqa/test-{language}.json").read_text())
        exact, f1 = squad(root / f"tydiqa/tydiqa-goldp-v1.1-dev/tydiqa.goldp.{language}.dev.json", predictions)
        row = spans.evaluation["results"][0]["languages"][language]
        assert (row["exact"], row["value"]) == pytest.approx((exact, f1))


def read_tag(file: Path) -> list[list[str]]:
    """XTREME's `read_tag`."""
    labels, example = [], []
    for line in file.read_text().split("\n")[:-1]:
        if line.strip():
            example.append(line.strip())
        else:
            labels.append(example)
            example = []
    return labels


def squad(file: Path, predictions: dict[str, str]) -> tuple[float, float]:
    """`evaluate` of SQuAD 1.1's script, as shares."""

    def normal(text: str) -> str:
        text = "".join(ch for ch in text.lower() if ch not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

    def f1(prediction: str, truth: str) -> float:
        one, other = normal(prediction).split(), normal(truth).split()
        same = sum((collections.Counter(one) & collections.Counter(other)).values())
        return 0 if same == 0 else 2 * same / (len(one) + len(other))

    exact = total = score = 0.0
    for article in json.loads(file.read_text())["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                total += 1
                truths = [answer["text"] for answer in qa["answers"]]
                given = predictions[qa["id"]]
                exact += max(normal(given) == normal(truth) for truth in truths)
                score += max(f1(given, truth) for truth in truths)
    return exact / total, score / total
