"""Every registered task keeps the contract of `pointsman_lab.testing`."""

import gzip
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pointsman_lab.finetuning import Finetuning
from pointsman_lab.registry import entries, preset_config
from pointsman_lab.tasks.crosslingual.data import load_xtreme
from pointsman_lab.testing import Example, check_task
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.trainer import train
from tests.tasks.crosslingual.fixtures import pretrained, sentence, write_data

SHAPE = {"num_layers": 2, "dim": 16, "num_heads": 2, "head_dim": 8, "hidden_dim": 16, "num_experts": 4}
SETTINGS = {"steps": 3, "batch_size": 8, "eval_batch_size": 8, "checkpoint_every": 2, "validate_every": 2,
            "eval_top_k": (1, 4), "train_top_k": "2", "eval_tokens": 256, "valid_tokens": 128}  # fmt: skip


def text(folder: Path, name: str = "text.txt") -> str:
    draw = random.Random(name)
    file = folder / name
    file.write_text("".join(sentence(draw) + ".\n" for _ in range(400)))
    return str(file)


def language_modelling(folder: Path) -> Example:
    broken = folder / "broken.txt.gz"
    broken.write_bytes(gzip.compress(b"the same text " * 999)[:-20])
    model = preset_config("tiny", 256, router="smoe", **SHAPE)
    lengths = {"segment_length": 16, "memory_length": 16, "eval_segment_length": 16, "eval_memory_length": 16}
    config = RunConfig.of(model=model, data=text(folder), **SETTINGS, **lengths)
    damaged = {"broken.txt.gz": str(broken), "gone.txt": str(folder / "gone.txt")}
    return Example.of(config, text(folder, "other.txt"), damaged)


def masked_language_modelling(folder: Path) -> Example:
    for name in ("texts", "others", "bad"):
        (folder / name).mkdir()
        for language in ("en", "de"):
            text(folder / name, f"{language}.txt")
    (folder / "others" / "en.txt").write_text((folder / "others" / "de.txt").read_text())
    (folder / "bad" / "fr.txt").write_text("")
    changes = {"norm": "pre", "moe_layers": "after:1", "max_length": 32, "router": "xmoe"}
    model = preset_config("tiny-mlm", 200, **{**SHAPE, **changes})
    config = RunConfig.of(
        model=model, data=f"multilingual:{folder / 'texts'}", segment_length=16, memory_length=0, pieces=96, **SETTINGS
    )
    return Example.of(config, f"multilingual:{folder / 'others'}", {"'fr'": f"multilingual:{folder / 'bad'}"})


def translation(folder: Path) -> Example:
    pytest.importorskip("sacrebleu")
    draw = random.Random(0)
    for name in ("pairs", "others", "bad"):
        (folder / name).mkdir()
        for stem, count in (("train", 60), ("val", 4), ("test", 4)):
            rows = [sentence(draw, 2, 5) for _ in range(count)]
            (folder / name / f"{stem}.de").write_text("".join(row + "\n" for row in rows))
            (folder / name / f"{stem}.en").write_text("".join(row[::-1] + "\n" for row in rows))
    (folder / "bad" / "train.de").write_text("eins\n")
    model = preset_config("tiny-mt", 100, **SHAPE, router="switch", max_length=24)
    config = RunConfig.of(
        model=model, data=f"parallel:{folder / 'pairs'}:from=de:to=en", segment_length=24, memory_length=0, pieces=60,
        **SETTINGS,
    )  # fmt: skip
    other, bad = (f"parallel:{folder / name}:from=de:to=en" for name in ("others", "bad"))
    return Example.of(config, other, {"train.de": bad})


def images(folder: Path) -> Example:
    image = pytest.importorskip("PIL.Image")
    draw = random.Random(0)
    for name in ("pictures", "others", "bad"):
        for part, count in (("train", 8), ("valid", 2), ("test", 4)):
            for number in range(2):
                place = folder / name / part / f"class-{number}"
                place.mkdir(parents=True)
                for index in range(count):
                    image.new("RGB", (8, 8), (draw.randrange(256), 99 * number, 9)).save(place / f"{index}.png")
    (folder / "bad" / "train" / "class-1" / "3.png").write_bytes(b"\x89PNG no more")
    model = preset_config("tiny-vit", 1, **SHAPE, router="vmoe", patch=4, moe_layers="last:1")
    config = RunConfig.of(model=model, data=str(folder / "pictures"), augment="crop=1+flip", **SETTINGS)
    return Example.of(config, str(folder / "others"), {"3.png": str(folder / "bad")})


def reviews(folder: Path, name: str) -> str:
    draw = random.Random(name)
    (folder / name).mkdir()
    for part, count in (("train", 40), ("valid", 8), ("test", 8)):
        rows = [f"{sentence(draw)},{'pos' if n % 2 else 'neg'}" for n in range(count)]
        (folder / name / f"{part}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return str(folder / name)


def classification(folder: Path) -> Example:
    before = language_modelling(folder).open()[1]
    train(replace(before, validate_every=0), folder / "before")
    bad = reviews(folder, "bad")
    Path(bad, "train.csv").write_text("text,label\n,pos\nsome words,neg\n")
    settings = Finetuning(reviews(folder, "reviews"), steps=3, length=32, settings={"batch_size": 8})
    return Example.finetuned(folder / "before", settings, reviews(folder, "others"), {"train.csv, line 2": bad})


def crosslingual(folder: Path) -> Example:
    data, bad = folder / "data", folder / "bad"
    bad.mkdir()
    write_data(data)
    write_data(bad)
    (bad / "panx" / "train-en.tsv").write_text("word\tB-PERSON\n")
    settings = Finetuning("panx", steps=3, length=32, settings={"batch_size": 8, "eval_top_k": (1, 4)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POINTSMAN_DATA", str(data))
        example = Example.finetuned(pretrained(data, folder / "before"), settings, "tydiqa", {})
    return replace(example, damaged={"train-en.tsv: line 1": lambda: load_xtreme("panx", bad)})


CASES: dict[str, Callable[[Path], Example]] = {
    case.__name__: case
    for case in (language_modelling, masked_language_modelling, translation, images, classification, crosslingual)
}


def test_every_task_that_is_trained_has_a_case() -> None:
    assert {entry.name for entry in entries() if entry.families or entry.learns} == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_contract(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentencepiece")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("POINTSMAN_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    check_task(CASES[name](tmp_path), tmp_path / "runs")
