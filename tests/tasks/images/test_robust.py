"""Robustness of image classifiers: figures, attacks, sources of images, records, tables."""

import json
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("scipy")

from PIL import Image

from pointsman._errors import RunError
from pointsman.delivery import deliveries
from pointsman.recording import record_routing
from pointsman_lab.cli.main import main
from pointsman_lab.progress import Quiet
from pointsman_lab.report.published import Column
from pointsman_lab.runs.comparison import read_comparison
from pointsman_lab.runs.record import RunRecord
from pointsman_lab.tasks.images import scores
from pointsman_lab.tasks.images.attacks import ATTACKS, SIZE, attacked, under_gradient_attack
from pointsman_lab.tasks.images.augment import evaluation_batches
from pointsman_lab.tasks.images.corruptions import CORRUPTIONS, corrupt
from pointsman_lab.tasks.images.image_set import ClassNames
from pointsman_lab.tasks.images.part import ImagePart, chosen_rows
from pointsman_lab.tasks.images.robust import Asked, robustness, save_robustness
from pointsman_lab.tasks.images.robust_table import _relative, published, robust_tables, table_of
from pointsman_lab.tasks.images.shifts import Frame, Seen, on_outliers, under_corruptions
from pointsman_lab.tasks.images.sources import Corrupted
from pointsman_lab.tasks.images.task import open_images
from pointsman_lab.tasks.images.vit import VisionTransformer, VisionTransformerConfig
from pointsman_lab.training.compare import Plan, compare
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.run import load_run

FRAME = Frame(16, (2,))


def test_the_false_positive_rate_is_that_at_the_nearest_recall() -> None:
    values, positive = np.arange(25, 0, -1.0), np.array([True] * 19 + [False] * 3 + [True] + [False] * 2)
    found = scores.detection(values, positive)
    assert found["fpr95"] == pytest.approx(3 / 5)  # the lowest threshold at which 19 of 20 are found
    assert found["auroc"] == pytest.approx(1 - 3 / 100)  # of 100 pairs three are in the wrong order
    assert found["aupr"] == pytest.approx((19 + 20 / 23) / 20)


def test_calibration_by_hand() -> None:
    confidence = np.array([0.9, 0.8, 0.7, 0.6])
    right = np.array([True, True, False, True])
    # bins of two by rising confidence: (0.65, 0.5), (0.85, 1)
    assert scores.rms_calibration_error(confidence, right, 2) == pytest.approx(np.sqrt((0.15**2 + 0.15**2) / 2))
    assert scores.rms_calibration_error(confidence, right, 3) == pytest.approx(
        np.sqrt((3 * (2 / 3 - 0.7) ** 2 + 0.1**2) / 4)  # the last, smaller bin counts
    )
    assert scores.expected_calibration_error(confidence, right, 2) == pytest.approx(abs(0.75 - 0.75))
    assert scores.expected_calibration_error(confidence, right, 15) == pytest.approx((0.1 + 0.2 + 0.7 + 0.4) / 4)
    edges = np.array([0.3, 0.5, 0.6]), np.array([True, False, True])  # a bin holds its upper end: (0.25, 0.5]
    assert scores.expected_calibration_error(*edges, 4) == pytest.approx((2 * 0.1 + 0.4) / 3)
    assert scores.response_rate_accuracy(confidence, right) == pytest.approx((1 + 1 + 2 / 3 + 3 / 4) / 4)


def test_imagenet_c_is_relative_to_alexnet_with_its_clean_error() -> None:
    rows = [{"top_k": 2, "corruption": name, "value": 0.4} for name in CORRUPTIONS]
    record = {"imagenet_c": True, "every_k": False, "results": rows, "clean": [{"top_k": 2, "value": 0.7}]}
    found = [_relative({0: record}, 2, {0: record}, rise=rise).values[0] for rise in (False, True)]
    errors = np.array(list(scores.ALEXNET.values()))
    assert found == pytest.approx([np.mean(0.6 / errors), np.mean((0.6 - 0.3) / (errors - 0.435))])
    assert _relative({0: record}, 2, {}, rise=False).values[0] == found[0], "the first row has no such seed"


def test_the_csv_of_a_table_has_full_precision() -> None:
    def record(clean: float) -> dict[str, Any]:
        rows = [{"top_k": 2, "value": clean - 0.25, "clean": clean, "gap": 0.25}]
        return {"kind": "a", "every_k": False, "cost": {}, "protocol": {"top_k": [2]}, "results": rows}

    runs = {("smoe", 0): record(0.5), ("smoe", 1): record(2 / 3), ("plain", 1): record(0.75)}
    [header, *rows] = [line.split(",") for line in table_of(("smoe", "plain"), "x", runs).csv().splitlines()]
    assert header[:6] == ["k", "router", "clean mean", "clean std", "clean seeds", "accuracy mean"]
    mean, std = statistics.fmean([0.5, 2 / 3]), statistics.stdev([0.5, 2 / 3])
    assert [row[:5] for row in rows] == [["2", "smoe", str(mean), str(std), "2"], ["2", "plain", "0.75", "-", "1"]]


def test_a_table_says_what_its_figures_are_of() -> None:
    def record(clean: float, scored: int = 21) -> dict[str, Any]:
        rows = [{"top_k": 2, "value": clean - 0.25, "clean": clean, "gap": 0.25}]
        own = {"shifted_data": "A: 3 classes", "images": scored, "classes": 3, "clean_images": 27, "results": rows}
        return {"kind": "a", "every_k": False, "cost": {}, "protocol": {"images": 54, "top_k": [2]}, **own}

    runs = {("smoe", 0): record(0.5), ("smoe", 1): record(2 / 3), ("plain", 1): record(0.75)}
    table = table_of(("smoe", "plain", "xmoe"), "robust-a-A", runs, (0, 1))
    said = "images: 54; top k: 2; shifted: A: 3 classes; scored: 21; classes: 3; clean images of these classes: 27"
    assert table.protocol == f"{said}. Missing: plain: seeds 0; xmoe: seeds 0, 1"
    assert table.latex().startswith("% Hard photographs (ImageNet-A). ")
    mixed = table_of(("smoe", "plain"), "robust-a-A", {**runs, ("plain", 0): record(0.75, 6)}, (0, 1))
    assert mixed.protocol == f"{said}; rows differ in scored: their figures are not comparable"


def test_the_reference_of_hard_images_is_no_value_of_its_row() -> None:
    def record(weights: str, value: float) -> dict[str, Any]:
        rows = [{"top_k": 2, "value": value, "clean": 0.5, "gap": 0.5 - value}]
        own = {"kind": "hard", "results": rows, "asked": {"from": {"weights": weights, "path": "reference"}}}
        return {"every_k": False, "cost": {}, "protocol": {"top_k": [2]}, **own}

    runs = {("plain", 0): record("reference", 0.0), ("plain", 1): record("another", 0.25)}
    cells = table_of(("plain",), "robust-hard-plain-seed-0", runs).cells[2]["plain"]
    assert [cells[name].values for name in ("clean", "accuracy", "gap")] == [{0: 0.5, 1: 0.5}, {1: 0.25}, {1: 0.25}]


def test_a_papers_column_takes_records_of_its_own_part(tmp_path: Path) -> None:
    for split, value in (("test", 0.5), ("valid", 0.9)):
        record = {"kind": "c", "protocol": {"split": split, "top_k": [2]}, "results": [{"top_k": 2, "value": value}]}
        (tmp_path / Asked.parse("c", split=split).file).write_text(json.dumps(record))
    assert published(RunRecord(tmp_path, "smoe", 0, {}), Column("IN-C", shift="c"), 2) == 0.5


def test_corruption_errors_are_of_all_seeds_and_of_rises_that_were_measured() -> None:
    def record(corrupted: float, images: int) -> dict[str, Any]:
        rows = [{"top_k": 2, "corruption": name, "value": corrupted} for name in CORRUPTIONS]
        clean = [{"top_k": 2, "value": 0.5}]
        return {"every_k": False, "results": rows, "clean": clean, "protocol": {"images": images}}

    own = {seed: record(0.35, 200) for seed in range(3)}
    # the rise from 0.5 to 0.6 is 0.1; two standard errors are 0.0990 of 200 images and 0.1010 of 192
    first = {seed: record(0.4, 200) for seed in range(3)}
    assert _relative(own, 2, first, rise=True).values == pytest.approx(dict.fromkeys(range(3), 1.5))
    few = {**first, 1: record(0.4, 192)}
    assert (_relative(own, 2, few, rise=True).values, len(_relative(own, 2, few, rise=False).values)) == ({}, 3)
    less = {seed: first[seed] for seed in (0, 2)}
    assert _relative(own, 2, less, rise=False).values == {}, "no seed is dropped without a word"


def test_corruption_errors_by_hand() -> None:
    own, other = {"fog": [0.2, 0.4], "snow": [0.5, 0.5]}, {"fog": [0.4, 0.4], "snow": [0.5, 1.0]}
    assert scores.corruption_error(own, other) == pytest.approx((0.6 / 0.8 + 1.0 / 1.5) / 2)
    assert scores.corruption_error(own, other, 0.1, 0.2) == pytest.approx((0.4 / 0.4 + 0.8 / 1.1) / 2)
    assert scores.corruption_error(own, other, 0.1, 0.4) is None
    assert set(scores.ALEXNET) == set(CORRUPTIONS)
    assert scores.corruption_error(own, {"fog": [1.0]}) is scores.corruption_error(own, {**other, "fog": [0.0]}) is None


def model(router: str = "smoe:balance=1") -> VisionTransformer:
    built = VisionTransformer(
        VisionTransformerConfig(
            image_size=8, patch=4, num_classes=3, num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=16,
            num_experts=4, router=router, moe_layers="last:1", pooling="mean", init_std=0.3,
        )
    )  # fmt: skip
    torch.nn.init.normal_(built.head.classify.weight)
    return built


def part(count: int = 40, side: int = 8) -> ImagePart:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return ImagePart([str(row) for row in range(count)], draw.integers(0, 3, count), images.__getitem__, side=side)


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_follow_the_gradient_of_the_classes_alone(name: str) -> None:
    net = model().eval()
    images = torch.rand(6, 3, 8, 8) * 2 - 1
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    with torch.no_grad():
        before = torch.nn.functional.cross_entropy(net(images), labels)
        moved = attacked(net, images, labels, ATTACKS[name])
        assert torch.nn.functional.cross_entropy(net(moved), labels) > before
    assert float((moved - images).abs().max()) <= SIZE + 1e-6
    assert float(moved.abs().max()) <= 1
    net.train()
    found = under_gradient_attack(net, part(), name, top_k=2, frame=FRAME)
    assert net.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
    assert all(one.how == "collect" for one in deliveries(net).values())
    assert found["attacked"] <= found["clean"]
    assert found["images"] == 40
    assert 0 < found["layers"]["layers.1.moe"]["iou"] <= 1
    assert under_gradient_attack(model("plain"), part(), name, top_k=None, frame=FRAME)["layers"] == {}


@pytest.mark.parametrize("router", ["smoe", "expert-choice", "smoe:capacity=0.5"])
def test_shared_experts_are_a_mean_over_the_tokens_that_have_some(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman_lab.tasks.images.attacks.attacked", lambda model, images, *_: -images)
    net = model(router).eval()
    found = under_gradient_attack(net, part(), "fgsm", top_k=2, frame=Frame(40, (2,)))["layers"]["layers.1.moe"]["iou"]
    sets = []
    [(images, _)] = evaluation_batches(part(), 40)
    for sign in (1, -1):
        with torch.no_grad(), record_routing(net) as records:
            net(sign * images)
        sets.append([set(row) - {-1} for row in records["layers.1.moe"].experts.tolist()])
    wanted = [len(one & two) / len(one | two) for one, two in zip(*sets, strict=True) if one | two]
    assert (len(wanted) < 160) == ("capacity" in router)
    assert found == pytest.approx(np.mean(wanted))


def test_images_that_no_attack_changed_have_the_same_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman_lab.tasks.images.attacks.attacked", lambda model, images, *_: images)
    found = under_gradient_attack(model("thor"), part(), "fgsm", top_k=2, frame=FRAME)
    assert found["attacked"] == found["clean"]
    assert found["layers"]["layers.1.moe"]["iou"] == 1


def test_fluctuation_is_between_the_clean_and_the_corrupted_image() -> None:
    net, clean = model(), part()
    same = under_corruptions(net, clean, lambda *_: clean, routing_k=2, frame=replace(FRAME, top_k=(1, 4)))
    assert len(same["results"]) == 2 * 75
    assert len(same["routing"]) == 75
    assert all(row["layers"]["layers.1.moe"]["top1"] == 0 for row in same["routing"])
    assert same["results"][0]["value"] == same["clean"][0]["value"]
    other = replace(clean, load=lambda row: 255 - clean.load(row))
    moved = under_corruptions(net, clean, lambda *_: other, routing_k=2, frame=FRAME)
    assert moved["routing"][0]["layers"]["layers.1.moe"]["top1"] > 0
    mixed = replace(clean, labels=clean.labels[::-1].copy())
    assert not under_corruptions(net, clean, lambda *_: mixed, routing_k=2, frame=FRAME)["routing"]


def test_the_uncertain_images_are_the_outliers(monkeypatch: pytest.MonkeyPatch) -> None:
    sure, unsure = (Seen(torch.tensor([[top, 0.0]] * 4), torch.zeros(4, dtype=torch.int64)) for top in (9.0, 1.0))
    seen = iter([sure, unsure])
    monkeypatch.setattr("pointsman_lab.tasks.images.shifts.look", lambda *_: next(seen))
    [found] = on_outliers(model(), part(4), part(4), None, FRAME)["results"]
    assert (found["aupr"], found["auroc"], found["fpr95"]) == (1.0, 1.0, 0.0)


def test_a_missing_scikit_learn_is_told_before_images_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setattr("pointsman_lab.tasks.images.shifts.look", lambda *_: pytest.fail("images were read"))
    with pytest.raises(RunError, match=r"scikit-learn: pip install 'pointsman\[vision\]'"):
        on_outliers(model(), part(4), part(4), None, FRAME)


def test_outliers_have_low_confidence() -> None:
    net, inliers = model(), part()
    found = on_outliers(net, inliers, part(10), None, FRAME)
    assert found["base_rate"] == 10 / 50
    same = on_outliers(net, inliers, inliers, [0, 1], FRAME)["results"][0]
    assert same["auroc"] == pytest.approx(0.5)


@pytest.fixture(scope="session")
def sheets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of 32 x 32 pixels, as CIFAR's sheets."""
    root, draw = tmp_path_factory.mktemp("sheets") / "ten", np.random.default_rng(0)
    root.mkdir()
    for name, labels, count in (
        ("data_batch_1.png", "train_labels_batch_1.json", 60),
        ("test_batch.png", "test_labels.json", 20),
    ):
        rows = draw.integers(0, 256, (count, 1024, 3), dtype=np.uint8)
        Image.fromarray(rows).save(root / name)
        (root / labels).write_text(json.dumps([index % 10 for index in range(count)]))
    return root


def test_own_corruptions_are_made_once_and_depend_on_the_number_of_the_image(sheets: Path) -> None:
    images = open_images(str(sheets))
    clean = images.split("test")
    some, every = (Corrupted(images, "test", rows, None) for rows in (chosen_rows(clean, 4), chosen_rows(clean, None)))
    assert some.rows == [0, 6, 12, 19]
    one, two = some("fog", 3), every("fog", 3)
    assert np.array_equal(one.pixels(), two.pixels(some.rows))
    assert np.array_equal(two.pixels(), corrupt(clean.pixels(), "fog", 3))
    assert np.array_equal(some("fog", 3).pixels(), one.pixels())
    assert np.array_equal(one.labels, clean.labels[some.rows])


def test_a_damaged_cache_is_made_anew(sheets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = Corrupted(open_images(str(sheets)), "test", [3, 5], None)
    made = source("fog", 3).pixels()
    [file] = tmp_path.rglob("*.npy")
    whole = file.read_bytes()
    for length in (0, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert np.array_equal(source("fog", 3).pixels(), made)
        assert file.read_bytes() == whole


def test_published_files_are_preferred(sheets: Path, tmp_path: Path) -> None:
    images = open_images(str(sheets))
    clean = images.split("test")
    arrays = np.concatenate([corrupt(clean.pixels(), "contrast", severity) for severity in range(1, 6)])
    np.save(tmp_path / "contrast.npy", arrays)
    np.save(tmp_path / "labels.npy", np.tile(clean.labels, 5))
    source = Corrupted(images, "test", [3, 5], tmp_path)
    assert np.array_equal(source("contrast", 4).pixels(), arrays[60:80][[3, 5]])
    for place, label in enumerate(clean.labels):
        folder = tmp_path / "fog" / "2" / images.classes[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(clean.pixels([place])[0]).save(folder / f"{place:03}.png")
    found = source("fog", 2)
    assert len(found) == 2
    with pytest.raises(RunError, match=r"neither snow\.npy nor snow/1"):
        source("snow", 1)
    strange = open_images(str(tmp_path / "fog" / "2"))
    assert len(strange.relabelled(images.classes).split("test")) == 20


@pytest.fixture(scope="session")
def comparison(sheets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = VisionTransformerConfig(
        num_layers=1, dim=16, num_heads=2, head_dim=8, hidden_dim=16, num_experts=4, patch=8, moe_layers="last:1",
        pooling="mean", router="smoe",
    )  # fmt: skip
    base = RunConfig(model=shape, data=str(sheets), steps=2, batch_size=8, train_top_k="2", checkpoint_every=2)

    out = tmp_path_factory.mktemp("compared") / "out"
    compare(Plan(base, ("plain", "smoe+similarity"), (0,)), out, progress=Quiet())
    return out


def run_of(out: Path, router: str = "smoe+similarity") -> Path:
    return next(path.parent for path in out.rglob("config.json") if router in str(path))


@pytest.mark.parametrize("kind", ["pgd", "fgsm", "hard", "r", "o"])
def test_every_kind_has_a_record_and_a_table(
    kind: str, comparison: Path, sheets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ""
    if kind == "hard":
        path = f":{run_of(comparison, 'plain')}"
    if kind in ("r", "o"):
        images = open_images(str(sheets))
        for place in range(12 if kind == "r" else 6):  # two of the ten classes
            name = images.classes[place % 2] if kind == "r" else f"strange-{place % 2}"
            folder = tmp_path / "shifted" / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(255 - images.split("test").pixels([place])[0]).save(folder / f"{place}.png")
        path = f":{tmp_path / 'shifted'}"
    words = ["evaluate", str(comparison), "--robust", f"{kind}{path}", "--top-k", "2", "--eval-tokens", "160"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "smoe+similarity" in printed
    assert "plain" in printed
    record = next(run_of(comparison).glob(f"robust-{kind}*.json"))
    values: dict[str, Any] = json.loads(record.read_text())
    assert values["checkpoint"] == "step-2"
    if kind == "o":  # a half of the outliers, too
        assert (values["inliers"], values["outliers"], values["base_rate"]) == (10, 3, 3 / 13)
    assert kind != "r" or values["images"] == 10  # as many as --eval-tokens has
    before = record.stat().st_mtime_ns
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert record.stat().st_mtime_ns == before
    assert (tmp_path / "out" / f"{record.stem}.csv").is_file()
    capsys.readouterr()
    assert main(["evaluate", str(run_of(comparison)), *words[2:], "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / record.name).is_file()
    printed = capsys.readouterr().out
    assert "k=2" in printed
    assert kind != "o" or "base rate" in printed


def test_records_of_two_paths_are_two_and_follow_what_they_are_made_from(comparison: Path, tmp_path: Path) -> None:
    names = [Asked.parse(f"hard:{tmp_path}/{router}/seed-1").file for router in ("plain", "vmoe")]
    assert names == ["robust-hard-plain-seed-1.json", "robust-hard-vmoe-seed-1.json"]
    assert [Asked.parse(kind).file for kind in ("c", "o")] == ["robust-c.json", "robust-o.json"]
    reference = tmp_path / "reference"
    shutil.copytree(run_of(comparison, "plain"), reference)
    run, asked = load_run(run_of(comparison)), Asked.parse(f"hard:{reference}")
    _, file = save_robustness(run, asked)
    assert json.loads(file.read_text())["reference_k"] == 4  # plain has no choice
    file.write_text(file.read_text().replace('"kind": "hard"', '"kind": "kept"'))
    assert save_robustness(run, asked)[0]["kind"] == "kept"
    shutil.rmtree(reference)
    shutil.copytree(run_of(comparison), reference)  # other weights at the same step
    again, _ = save_robustness(run, asked)
    assert (again["kind"], again["reference_k"]) == ("hard", 2)
    assert again["results"][0]["value"] == 0  # its own mistakes, at the same k
    file.unlink()


def test_other_classes_are_left_out_of_the_logits() -> None:
    seen = Seen(torch.tensor([[3.0, 2.0, 1.0], [0.0, 2.0, 1.0]], dtype=torch.float64), torch.tensor([1, 2]))
    assert (seen.accuracy, seen.restricted([1, 2]).accuracy, seen.restricted([2]).accuracy) == (0.0, 0.5, 0.5)
    assert seen.restricted([1, 2]).confidence == pytest.approx([1 / (1 + np.exp(-1.0))] * 2)


def test_a_part_of_a_folder_is_told_apart_among_all_of_its_classes(comparison: Path, tmp_path: Path) -> None:
    run = load_run(run_of(comparison))
    images = open_images(run.config.data)
    for name in images.classes:
        (tmp_path / "other" / name).mkdir(parents=True)
        Image.fromarray(images.split("test").pixels([0])[0]).save(tmp_path / "other" / name / "0.png")
    for tokens in (None, 1):  # one image at least
        found = robustness(run, Asked.parse(f"r:{tmp_path / 'other'}", tokens=tokens))
        assert (found["classes"], found["images"]) == (
            len(images.classes),
            len(images.classes) if tokens is None else 1,
        )
    with pytest.raises(RunError, match="its images have 16 pixels a side, and the model reads"):
        robustness(run, Asked.parse(f"r:{tmp_path / 'other'}:size=16"))


def test_outliers_in_folders_of_known_classes_are_scored_among_these(comparison: Path, tmp_path: Path) -> None:
    """As ImageNet-O has it: the folder is the class that an outlier is mistaken for."""
    run = load_run(run_of(comparison))
    images = open_images(run.config.data)
    for place in range(6):
        folder = tmp_path / "strange" / images.classes[place % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - images.split("test").pixels([place])[0]).save(folder / f"{place}.png")
    found = robustness(run, Asked.parse(f"o:{tmp_path / 'strange'}"))
    assert (found["inliers"], found["outliers"], found["base_rate"]) == (4, 6, 0.6)
    shutil.copytree(tmp_path / "strange" / images.classes[0], tmp_path / "strange" / "unknown")
    with pytest.raises(RunError, match=r"the model learned some of its classes \(airplane, automobile\); allowed are"):
        robustness(run, Asked.parse(f"o:{tmp_path / 'strange'}"))
    shutil.rmtree(tmp_path / "strange" / "unknown")
    with pytest.raises(RunError, match=r"its data here are not those of its training: files are other or missing"):
        robustness(replace(run, data="another"), Asked.parse("c"))
    for name in images.classes[:2]:
        shutil.copytree(tmp_path / "strange" / name, tmp_path / "alone" / "test" / name)
    alone = replace(run, config=run.config.with_overrides({"data": f"{tmp_path / 'alone'}:size={images.side}"}))
    assert alone.task().name == "alone", "no training part to compare"


def test_images_have_the_classes_that_the_run_learned(comparison: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(run_of(comparison))
    names, labels = run.vocabulary.names, open_images(run.config.data).split("test").labels
    seen: list[ImagePart] = []

    def look(model: object, clean: ImagePart, *_: object, **__: object) -> dict[str, Any]:
        seen.append(clean)
        return {}

    for name in ("under_gradient_attack", "on_hard_images"):
        monkeypatch.setattr(f"pointsman_lab.tasks.images.robust.{name}", look)
    other = replace(run, vocabulary=ClassNames(names[::-1]))
    references = [run, other]
    monkeypatch.setattr("pointsman_lab.tasks.images.robust.load_run", lambda *_, **__: references.pop())
    for text in ("fgsm", f"hard:{run.path}"):
        robustness(other, Asked.parse(text))
        assert np.array_equal(seen.pop().labels, len(names) - 1 - labels)
    with pytest.raises(RunError, match="learned other images or classes"):
        robustness(other, Asked.parse(f"hard:{run.path}"))
    with pytest.raises(RunError, match="is none of the 9 that the model learned"):
        robustness(replace(run, vocabulary=ClassNames(names[1:])), Asked.parse("fgsm"))


def test_attacks_compute_as_the_run_does(comparison: Path) -> None:
    run = load_run(run_of(comparison))
    run = replace(run, config=run.config.with_overrides({"precision": "bfloat16"}))
    dtypes: list[torch.dtype] = []
    run.model.head.register_forward_hook(lambda *given: dtypes.append(given[2].dtype))
    robustness(run, Asked.parse("fgsm", tokens=160))
    assert dtypes == [torch.bfloat16] * 3 * -(-10 // run.config.eval_batch_size)


def test_published_files_are_those_of_the_path_as_the_user_sees_it(
    comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = load_run(run_of(comparison)), []
    clean = open_images(run.config.data).split("test")
    for folder, value in (("here", 1), ("data", 2)):  # the same name in the working folder and under POINTSMAN_DATA
        (tmp_path / folder / "set").mkdir(parents=True)
        np.save(tmp_path / folder / "set" / "fog.npy", np.full((100, 32, 32, 3), value, dtype=np.uint8))
        np.save(tmp_path / folder / "set" / "labels.npy", np.tile(clean.labels, 5))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    monkeypatch.setenv("POINTSMAN_DATA", str(tmp_path / "data"))

    def read(model: object, clean: ImagePart, source: Corrupted, **_: object) -> dict[str, Any]:
        found.append(int(source("fog", 2).pixels().max()))
        return {}

    monkeypatch.setattr("pointsman_lab.tasks.images.robust.under_corruptions", read)
    hashes = {save_robustness(run, Asked.parse(f"c:{path}"), out=tmp_path)[0]["asked"]["from"]["path"]
              for path in ("set", "~/set", f"{tmp_path}/here/set")}  # fmt: skip
    assert (found, len(hashes)) == ([1, 1, 1], 1)
    with pytest.raises(RunError, match="no folder of corrupted images"):
        robustness(run, Asked.parse("c:~nobody-at-all/set"))
    monkeypatch.setattr("pointsman_lab.tasks.images.severities.SIDES", ())
    assert robustness(run, Asked.parse("c:set")), "published files may be of any side"
    with pytest.raises(RunError, match="corruptions are defined for images of"):
        robustness(run, Asked.parse("c"))


def test_a_record_tells_how_many_images_were_read(comparison: Path) -> None:
    run = load_run(run_of(comparison))
    for tokens, read in (("run", 20), (None, 20), (160, 10)):
        found = robustness(run, Asked.parse("fgsm", tokens=tokens))
        assert found["protocol"]["images"] == found["results"][0]["images"] == read


def test_corruptions_of_a_comparison(
    comparison: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pointsman_lab.tasks.images.corruptions.corrupt", lambda images, *_: images)
    assert main(["evaluate", str(comparison), "--robust", "c", "--eval-tokens", "160"]) == 0
    printed = capsys.readouterr().out
    assert "relative mCE" in printed
    assert "Corrupted images" in (comparison / "report.html").read_text()
    [table] = [one for one in robust_tables(read_comparison(comparison)) if one.kind == "c"]
    assert table.by_corruption is not None
    assert table.grids[0].header[-3:] == ["mflop", "active", "params"]
    [clean] = set(table.by_corruption.rows[0][1:])  # nothing was corrupted
    assert clean == f"{float(table.grids[0].rows[0][1]):.1f}"
    assert {f"robust-c.{ending}" for ending in ("txt", "csv", "md", "tex")} <= {p.name for p in comparison.iterdir()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d", "unknown kind 'd'"), ("hart:x", "did you mean 'hard'"), ("a", "--robust a:PATH"),
        ("hard", "a run directory"), ("pgd:x", "takes no path"),
    ],
)  # fmt: skip
def test_bad_kinds_are_one_line(text: str, message: str) -> None:
    with pytest.raises(RunError, match=message) as error:
        Asked.parse(text)
    assert "\n" not in str(error.value)


def test_bad_paths_are_one_line(comparison: Path, sheets: Path, tmp_path: Path) -> None:
    run = load_run(run_of(comparison))
    name = open_images(run.config.data).classes[0]
    (tmp_path / "alone" / name).mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(tmp_path / "alone" / name / "0.png")

    def ask(text: str) -> Callable[[], object]:
        return lambda: robustness(run, Asked.parse(text))

    for text, message in (
        ("o", "no outliers are known for"),
        (f"c:{tmp_path / 'none'}", "no folder of corrupted images"),
        ("r:nowhere", "no images called 'nowhere'"),
        (f"hard:{tmp_path}", "is no run directory"),
        (f"r:{tmp_path / 'alone'}", "r:.*alone: one class, and logits are restricted to its classes"),
        (f"o:{tmp_path / 'alone'}", "o:.*alone: one class.* at least two are needed"),
    ):
        with pytest.raises(RunError, match=message):
            ask(text)()
