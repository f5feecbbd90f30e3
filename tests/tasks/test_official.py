"""`evaluate --predictions official`: the official scorers read our files, and give the figures of our records.

The scorers are fetched, never copied: POINTSMAN_ORIGINALS=github, or a folder of copies (owner+name). Without it the
files' form is tested alone.
"""

import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pointsman_lab.cli.main import main
from pointsman_lab.finetuning.run import finetune
from pointsman_lab.finetuning.settings import Finetuning
from pointsman_lab.models.encoder import EncoderConfig
from pointsman_lab.tasks.crosslingual.data import load_xtreme
from pointsman_lab.tasks.crosslingual.scores import score_answers
from pointsman_lab.tasks.images.vit import VisionTransformerConfig
from pointsman_lab.tasks.translation.model import TranslationConfig
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.trainer import train
from tests.tasks.crosslingual.fixtures import pretrained, sentence, write_data
from tools.conformance.originals import File

ORIGINALS = os.environ.get("POINTSMAN_ORIGINALS", "")
fetches = pytest.mark.skipif(not ORIGINALS, reason="POINTSMAN_ORIGINALS: github, or a folder of copies")
pytestmark = pytest.mark.filterwarnings("ignore:invalid escape", "ignore:.*seems not to be NE tag")
XTREME = ("google-research/xtreme", "838c13b69daafb9328785d16caae2711e4012123")
MLQA = ("facebookresearch/MLQA", "24bf470b2e68f2bfb93b2fd31c370bb8ee18d9ed")
ADVERSARIAL = ("hendrycks/natural-adv-examples", "07770705658c3a1c8acce31fd9dbd68f06e297c3")


def fetched(folder: Path, repository: tuple[str, str], *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        text = File(*repository, path).text(None if ORIGINALS == "github" else Path(ORIGINALS))
        (folder / path).write_text(text)


def module(file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(file.parent))
    spec = util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    made = util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def record(run: Path) -> Mapping[str, Any]:
    (file,) = run.glob("evaluation-*.json")
    found: Mapping[str, Any] = json.loads(file.read_text())["results"][0]
    return found


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    data = write_data(tmp_path_factory.mktemp("data"))
    return data, pretrained(data, tmp_path_factory.mktemp("encoder") / "run")


@fetches
@pytest.mark.parametrize(("task", "called"), [("xnli-dev", "xnli"), ("panx-dev", "panx"), ("tydiqa", "tydiqa")])
def test_xtreme(
    task: str, called: str, encoder: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("seqeval")
    data, run = encoder
    monkeypatch.setenv("POINTSMAN_DATA", str(data))
    finetune(run, Finetuning(task, steps=3, length=48, settings={"eval_top_k": "1"}), out=tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--predictions", "official"]) == 0
    third = [f"third_party/{name}.py" for name in ("evaluate_mlqa", "evaluate_squad", "utils_mewslix")]
    fetched(tmp_path / "xtreme", XTREME, "evaluate.py", *third)
    scorer = module(tmp_path / "xtreme/evaluate.py", monkeypatch)
    for language, row in record(tmp_path / "run")["languages"].items():
        ending = "json" if called == "tydiqa" else "tsv"
        (given,) = (tmp_path / "run/predictions").glob(f"*/test-{language}.{ending}")
        labels = truth(data, called, language, tmp_path)
        found = scorer.evaluate_one_task(str(given), str(labels), called, language)
        ours = {"accuracy": row["value"], "f1": row["value"], "exact_match": row.get("exact")}
        assert {key: found[key] for key in found if key in ours} == pytest.approx(
            {key: 100 * ours[key] for key in found if key in ours}
        )
        if called == "tydiqa":
            fetched(tmp_path / "mlqa", MLQA, "mlqa_evaluation_v1.py")
            mlqa = module(tmp_path / "mlqa/mlqa_evaluation_v1.py", monkeypatch)
            told, asked = json.loads(given.read_text()), json.loads(labels.read_text())["data"]
            rows = [row for text in asked for paragraph in text["paragraphs"] for row in paragraph["qas"]]
            right = {row["id"]: [answer["text"] for answer in row["answers"]] for row in rows}
            again = mlqa.evaluate(asked, told, language)
            ours = score_answers(told, right, language)._asdict()
            assert {"exact": again["exact_match"], "f1": again["f1"]} == pytest.approx(
                {key: 100 * value for key, value in ours.items()}
            )


def truth(data: Path, task: str, language: str, folder: Path) -> Path:
    """The labels in XTREME's form."""
    if task == "tydiqa":
        return data / f"tydiqa/tydiqa.goldp.{language}.dev.json"
    file = folder / f"labels-{language}.tsv"
    if task == "panx":
        lines = (data / f"panx/dev-{language}.tsv").read_text().splitlines()
        file.write_text("".join(line.partition("\t")[2] + "\n" for line in lines))
        return file
    read = load_xtreme("xnli-dev", data)
    file.write_text("".join(f"{item.label}\n" for item in read.tests[language]))  # type: ignore[union-attr]
    return file


def test_sacrebleu(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    data = tmp_path / "text"
    data.mkdir()
    for part, count in (("train", 60), ("val", 8), ("test", 8)):
        for language in ("de", "en"):
            draw = random.Random(f"{part}{language}")
            (data / f"{part}.{language}").write_text("\n".join(sentence(draw) for _ in range(count)) + "\n")
    shape = TranslationConfig(
        vocab_size=60,
        num_layers=2,
        dim=16,
        num_heads=2,
        head_dim=8,
        hidden_dim=24,
        num_experts=4,
        max_length=24,
        router="switch",
    )
    config = RunConfig.of(
        model=shape, data=f"parallel:{data}:from=de:to=en", steps=4, batch_size=8, segment_length=24, memory_length=0,
        train_top_k="1", pieces=40, eval_top_k=(1,),
    )  # fmt: skip
    train(config, tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--predictions", "official"]) == 0
    [folder] = (tmp_path / "run/predictions").iterdir()
    files = [str(folder / "test-references.de-en.txt"), "-i", str(folder / "test-translations.de-en.txt")]
    command = [sys.executable, "-m", "sacrebleu", *files, "-b", "-w", "10", "-l", "de-en"]
    found = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found == pytest.approx(record(tmp_path / "run")["languages"]["de"]["value"], abs=1e-9)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on random images of two classes, of which 250 are tested."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 125)):
        for name in ("one", "two"):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                picture = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(picture).save(root / part / name / f"{number}.png")
    shape = VisionTransformerConfig(
        num_layers=1, dim=16, num_heads=2, head_dim=8, hidden_dim=16, num_experts=4, patch=4, moe_layers="last:1"
    )
    config = RunConfig(model=shape, data=str(root), steps=2, batch_size=8, train_top_k="2", checkpoint_every=2)
    train(config, root / "run")
    return root


def read(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and whether the class was found."""
    rows = list(csv.DictReader(file.read_text().splitlines()))
    return (np.array([float(row["confidence"]) for row in rows]),
            np.array([row["label"] == row["prediction"] for row in rows]))  # fmt: skip


def test_images(images: Path) -> None:
    assert main(["evaluate", str(images / "run"), "--predictions", "official"]) == 0
    confidence, right = read(images / f"run/predictions/{images.name}/test.csv")
    assert len(right) == 250
    assert right.mean() == record(images / "run")["value"]
    assert confidence.min() >= 0.5
    before = (images / f"run/predictions/{images.name}/test.csv").read_text()
    assert main(["evaluate", str(images / "run"), "--predictions", "official", "--top-k", "4"]) == 0
    assert (images / f"run/predictions/{images.name}/test.csv").read_text() == before, "those at the k of training"
    assert len(read(images / f"run/predictions/k4/{images.name}/test.csv")[0]) == 250


@fetches
def test_natural_adversarial_examples(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    fetched(tmp_path, ADVERSARIAL, "calibration_tools.py")
    scorer = module(tmp_path / "calibration_tools.py", monkeypatch)
    scorer.stable_cumsum = np.cumsum  # scikit-learn's, which the file uses without importing it
    for kind in ("r", "o"):
        command = ["evaluate", str(images / "run"), "--robust", f"{kind}:{images / 'test'}", "--top-k", "2"]
        assert main([*command, "--predictions", "official"]) == 0
    folder = images / "run/predictions/robust-r-test"
    ours = json.loads((images / "run/robust-r-test.json").read_text())["results"][0]
    confidence, right = read(folder / "shifted-k2.csv")
    assert right.mean() == ours["value"]
    assert scorer.aurra(confidence, right) == pytest.approx(ours["calibration"]["aurra"])
    order = np.argsort(confidence)
    last = slice(200, None)  # their loop leaves the last bin out, and a last bin of less than 100 joins the one before
    bins = [slice(0, 100), slice(100, 200), last]
    gaps = [(right[order][one].mean() - confidence[order][one].mean()) ** 2 for one in bins]
    whole = sum(gap * size for gap, size in zip(gaps, (100, 100, 50), strict=True)) / 250
    assert ours["calibration"]["rms"] == pytest.approx(np.sqrt(whole))
    assert scorer.calib_err(confidence, right) == pytest.approx(np.sqrt(gaps[0] * 100 / 250))
    ours = json.loads((images / "run/robust-o-test.json").read_text())["results"][0]
    sets = [read(images / f"run/predictions/robust-o-test/{name}-k2.csv")[0] for name in ("outliers", "inliers")]
    assert scorer.get_measures(-sets[0], -sets[1]) == pytest.approx((ours["auroc"], ours["aupr"], ours["fpr95"]))


def test_a_task_without_an_official_scorer_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "en.txt").write_text(
        "one two three four five.\n" * 300 + "a quick brown fox jumps over the lazy dog\n" * 90
    )
    shape = EncoderConfig(
        vocab_size=60, num_layers=1, dim=8, num_heads=1, head_dim=8, hidden_dim=8, max_length=32, moe_layers="last:1"
    )
    config = RunConfig.of(
        model=shape, data=f"multilingual:{tmp_path}", steps=1, batch_size=4, segment_length=16, memory_length=0,
        eval_tokens=64, valid_tokens=64, pieces=36, train_top_k="1",
    )  # fmt: skip
    train(config, tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--predictions", "official"]) == 2
    assert "no official scorer" in capsys.readouterr().err
