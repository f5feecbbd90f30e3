"""Image classification: learning, resuming, pairing, objectives, and what bad data get."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pointsman._errors import RunError
from pointsman_lab.diagnosis import Settings as DiagnosisSettings
from pointsman_lab.diagnosis import diagnose_path
from pointsman_lab.progress import Quiet
from pointsman_lab.recipes import preset
from pointsman_lab.runs.checkpoints import open_checkpoint
from pointsman_lab.tasks.images.task import ImageClassification, _Scores, image_loss, open_images
from pointsman_lab.tasks.images.vit import VisionTransformerConfig
from pointsman_lab.tasks.language_modelling.task import corpus_of
from pointsman_lab.training.checkpoint import checkpoint_tensors
from pointsman_lab.training.compare import Plan, compare
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.objectives import consistency, logits_alone, smoothed
from pointsman_lab.training.run import load_run
from pointsman_lab.training.state import Interrupted
from pointsman_lab.training.trainer import train

Image = pytest.importorskip("PIL.Image")
Settings = Callable[..., RunConfig]


def test_accuracies_by_hand() -> None:
    logits, labels = torch.zeros(4, 50), torch.tensor([0, 0, 1, 49])
    logits[:2, :7] = torch.arange(7.0, 0.0, -1.0)  # found; class 4 is among the five, 5 is not
    labels[1] = 5
    logits[2, 45:] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0])
    logits[3, 45:] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0])  # 49 is the fifth
    found = _Scores(50, "softmax")
    found.update(logits[:3], labels[:3])
    found.update(logits[3:], labels[3:])
    result = found.result()
    assert (result["value"], result["top5"], result["images"]) == (0.25, 0.5, 4)
    assert {place: share for place, share in enumerate(result["per_class"]) if share is not None} == {
        0: 1.0, 1: 0.0, 5: 0.0, 49: 0.0
    }  # fmt: skip
    nats = torch.nn.functional.cross_entropy(logits.double(), labels)
    assert result["nats"] == pytest.approx(float(nats), rel=1e-6)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of 8 x 8 pixels that differ in their colour: a folder of classes."""
    root, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for part, count in (("train", 20), ("valid", 4), ("test", 6)):
        for number in range(3):
            folder = root / part / f"class-{number}"
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 120, (8, 8, 3), dtype=np.uint8)
                pixels[..., number] += 120
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return root


@pytest.fixture
def settings(pictures: Path) -> Settings:
    def make(router: str = "vmoe", **changes: Any) -> RunConfig:
        model = VisionTransformerConfig(
            num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=16, num_experts=4, patch=4, router=router,
            moe_layers="last:1", pooling="mean", init_std=0.1,
        )  # fmt: skip
        config = RunConfig.of(
            model=model, data=str(pictures), steps=8, batch_size=12, eval_batch_size=7, augment="crop=1+flip+mixup=0.2",
            label_smoothing=0.1, train_top_k="2", learning_rate=3e-3, validate_every=4, checkpoint_every=3,
            keep_checkpoints=3, log_every=1, observe_every=2,
        )  # fmt: skip
        return config.with_overrides(changes)

    return make


class Stopping(Quiet):
    """Sets a flag at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step, self.event = step, threading.Event()

    def advance(self, done: int, values: Any) -> None:
        if done == self.step and "loss" in values:
            self.event.set()


def weights(out: Path, step: int = 8) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(out / "checkpoints" / f"step-{step}")
    return {**checkpoint_tensors(checkpoint, "model"), **checkpoint_tensors(checkpoint, "trainer")}


@pytest.mark.parametrize("router", ["vmoe", "xmoe+similarity", "thor"])
def test_stopped_and_resumed_equals_unbroken_bit_for_bit(settings: Settings, tmp_path: Path, router: str) -> None:
    config = settings(router, **({"label_smoothing": 0.0} if router == "thor" else {}))
    unbroken = train(config, tmp_path / "unbroken")
    stopping = Stopping(4)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "broken", progress=stopping, stop=stopping.event)
    resumed = train(config, tmp_path / "broken", resume=True)
    one, two = weights(unbroken.out), weights(resumed.out)
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert unbroken.evaluation["results"] == resumed.evaluation["results"]


def test_it_learns_and_its_figures_can_be_read_again(settings: Settings, tmp_path: Path) -> None:
    result = train(settings(steps=60, augment="flip", learning_rate=1e-2), tmp_path / "run")
    rows = {row["top_k"]: row for row in result.evaluation["results"]}
    assert list(rows) == [1, 2, 4]
    assert rows[2]["value"] > 0.8
    assert rows[2]["images"] == 18
    assert rows[2]["tokens"] == 18 * 4
    assert rows[2]["value"] == pytest.approx(sum(rows[2]["per_class"]) / 3)
    assert sum(rows[2]["routers"]["layers.1.moe"]["load"]) == pytest.approx(1)
    saved = load_run(tmp_path / "run")
    assert saved.vocabulary.names == ("class-0", "class-1", "class-2")
    assert (saved.config.model.num_classes, saved.config.model.image_size) == (3, 8)
    with pytest.raises(RunError, match="this is for language models"):
        corpus_of(saved)
    test = open_images(saved.config.data).split("test")
    pixels = torch.from_numpy(test.pixels()).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        found = saved.model(pixels).argmax(-1)
    assert float((found == torch.from_numpy(test.labels)).float().mean()) == pytest.approx(rows[2]["value"])


def test_a_run_is_diagnosed_with_its_earlier_checkpoints(settings: Settings, tmp_path: Path) -> None:
    for router in ("vmoe", "smoe"):
        train(settings(router), tmp_path / router)
    found = diagnose_path(tmp_path / "vmoe", [tmp_path / "smoe"], DiagnosisSettings(tokens=40, top_k=(2, 4)))
    assert found["protocol"]["images"] == 10
    assert found["protocol"]["tokens"] == 40
    layer = found["layers"]["layers.1.moe"]
    assert sum(layer["load"]["share"]) == pytest.approx(1)
    assert {pair[0] for row in layer["specialisation"]["top"] for pair in row} <= {0, 1, 2}
    assert set(found["tokens_text"].values()) <= {"class-0", "class-1", "class-2"}
    assert [row["top_k"] for row in layer["agreement"]] == [4]
    assert found["history"]
    assert found["against"]["smoe"]["layers.1.moe"]["fluctuation"]
    with pytest.raises(RunError, match="there is no split 'trian'"):
        diagnose_path(tmp_path / "vmoe", settings=DiagnosisSettings(split="trian"))


def test_rows_of_a_comparison_see_the_same_pictures(settings: Settings, tmp_path: Path) -> None:
    base = settings(steps=2)

    routers = ("vmoe", "plain", "smoe+attention:heads=all")
    for _ in range(2):  # the second call finds everything done
        compare(Plan(base, routers, (0,)), tmp_path / "comparison", progress=Quiet())
    runs = [load_run(folder.parent, step=2) for folder in sorted((tmp_path / "comparison").rglob("config.json"))]
    assert len(runs) == 3
    starts = [ImageClassification(open_images(base.data)) for _ in runs]
    first, *others = [
        task.batches(run.config, torch.device("cpu")).batch(1) for task, run in zip(starts, runs, strict=True)
    ]
    assert all(torch.equal(one, two) for other in others for one, two in zip(first, other, strict=True))
    models = [task.build_model(task.prepared(run.config)) for task, run in zip(starts, runs, strict=True)]
    shared = dict(models[0].named_parameters())
    for model in models[1:]:
        for name, parameter in model.named_parameters():
            if "router" not in name and "feed_forward" not in name and "experts" not in name:
                assert torch.equal(parameter, shared[name]), name


def test_losses_of_shared_labels() -> None:
    logits, labels = torch.randn(4, 3, dtype=torch.double), torch.rand(4, 3, dtype=torch.double)
    labels /= labels.sum(-1, keepdim=True)
    images = torch.zeros(4, 3, 8, 8)
    cross = -(labels * torch.log_softmax(logits, -1)).sum(-1).mean()

    def model(_: Tensor) -> Tensor:
        return logits

    soft = image_loss("softmax")(model, images, labels, None, 0)
    torch.testing.assert_close(soft.loss, cross.float(), check_dtype=False)
    sigmoid = image_loss("sigmoid")(model, images, labels, None, 0)
    p = torch.sigmoid(logits)
    expected = -(labels * p.log() + (1 - labels) * (1 - p).log()).sum(-1).mean()
    torch.testing.assert_close(sigmoid.loss, expected, check_dtype=False)
    smooth = smoothed(logits_alone, 0.1)(model, images, labels, None, 0)
    even = -torch.log_softmax(logits, -1).mean(-1).mean()
    torch.testing.assert_close(smooth.loss, 0.9 * cross + 0.1 * even, check_dtype=False)
    torch.testing.assert_close(smooth.nats, cross, check_dtype=False)
    two = consistency(5.0, logits_alone).run(model, images, labels, None, 0)
    torch.testing.assert_close(two.loss, cross, check_dtype=False)  # two equal passes


def test_presets_have_the_sizes_of_their_papers() -> None:
    tiny = preset("tiny-vit", router="plain")
    assert (tiny.data, tiny.own["augment"], tiny.model.layout.sparse) == ("cifar10-10k", "crop=4+flip", {1, 3})
    assert preset("tiny-vit", data="elsewhere").data == "elsewhere"
    paper = preset("vmoe-s32-last2", router="vmoe")
    assert paper.model.layout.sparse == {5, 7}
    assert (paper.batch_size, paper.learning_rate, paper.model.loss) == (8192, 3e-3, "sigmoid")


def check(config: RunConfig) -> None:
    ImageClassification.open(config).check(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment": "crip=4"}, "unknown 'crip': did you mean 'crop'"),
        ({"augment": "crop=9"}, "crop=9 is no smaller than the images, 8 x 8"),
        ({"model.patch": 3}, "patch=3: allowed are divisors of the images' side, 8"),
        ({"data": "cifar10-9k"}, "did you mean 'cifar10-10k'"),
    ],
)
def test_bad_settings_are_one_line(settings: Settings, changes: dict[str, Any], message: str) -> None:
    config = settings(**changes)
    with pytest.raises(RunError, match=message) as error:
        check(config)
    assert "\n" not in str(error.value)


def test_one_class_is_nothing_to_learn(settings: Settings, pictures: Path, tmp_path: Path) -> None:
    for part in ("train", "valid", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "class-0").symlink_to(pictures / part / "class-0")
    with pytest.raises(RunError, match="has one class, 'class-0'; at least two are needed"):
        check(settings(data=str(tmp_path)))


def test_settings_that_follow_from_the_data_cannot_be_set(settings: Settings) -> None:
    for name, why in (("num_classes", "number of classes"), ("image_size", "size=N")):
        with pytest.raises(RunError, match=why):
            settings(**{f"model.{name}": 3})
    config = settings(**{"model.loss": "sigmoid"})
    task = ImageClassification.open(config)
    model = task.build_model(task.prepared(config))
    with pytest.raises(RunError, match="sigmoid has none"):
        task.objective(model, config)
