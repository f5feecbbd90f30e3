"""Translation: cached decoding, search, and a run from files to BLEU."""

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sentencepiece")
pytest.importorskip("sacrebleu")

from pointsman._errors import RunError
from pointsman_lab.cli.main import main
from pointsman_lab.data.pieces import END, START
from pointsman_lab.data.task_streams import padded
from pointsman_lab.recipes import preset
from pointsman_lab.tasks.translation.data import ended, open_parallel
from pointsman_lab.tasks.translation.model import TranslationConfig, Translator, search
from pointsman_lab.tasks.translation.task import Translation, scorers
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.run import load_run
from pointsman_lab.training.task import pretraining_task
from pointsman_lab.training.trainer import train

SOURCES = padded([[5, 6, 7, 8, 9, 2], [10, 11, 2], [12, 2]])


def build(router: str = "smoe", **changes: Any) -> Translator:
    config = TranslationConfig(
        vocab_size=30, num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=24, num_experts=4, router=router,
        dropout=0.0, init_std=0.3, max_length=32, **changes,
    )  # fmt: skip
    return Translator(config).eval()


@pytest.mark.parametrize("router", ["plain", "xmoe", "smoe+similarity", "switch+attention"])
def test_a_cached_step_is_the_full_forward(router: str) -> None:
    model = build(router)
    target = torch.randint(4, 30, (3, 7))
    with torch.no_grad():
        keys, mask = model.encode(SOURCES)
        whole, _ = model.decode(target, keys, mask)
        memory, steps = None, []
        for place in range(7):
            logits, memory = model.decode(target[:, place : place + 1], keys, mask, memory)
            steps.append(logits)
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)
        pairs = torch.stack([torch.nn.functional.pad(SOURCES, (0, 1), value=-1), target], 1)
        torch.testing.assert_close(model(pairs), whole, rtol=1e-4, atol=1e-4)


def test_padding_changes_no_translation() -> None:
    model = build("xmoe")
    with torch.no_grad():
        keys, mask = model.encode(SOURCES)
        target = torch.tensor([[START, 4, 5], [START, 4, -1], [START, 6, 7]])
        together, _ = model.decode(target, keys, mask)
        for row, length in ((1, 2), (2, 3)):
            alone = model.encode(SOURCES[row : row + 1, SOURCES[row] >= 0])
            logits, _ = model.decode(target[row : row + 1, :length], *alone)
            torch.testing.assert_close(together[row, :length], logits[0], rtol=1e-4, atol=1e-4)
    every = search(model, SOURCES, 3)
    one_by_one = [search(model, row[row >= 0][None], 3)[0] for row in SOURCES]
    assert every == one_by_one


def greedy(model: Translator, source: torch.Tensor) -> list[int]:
    """Without a cache."""
    found = [START]
    keys, mask = model.encode(source)
    for _ in range(min(32, int(1.2 * source.shape[1]) + 10)):
        logits, _ = model.decode(torch.tensor([found]), keys, mask)
        best = int(logits[0, -1].argmax())
        if best == END:
            break
        found.append(best)
    return found[1:]


def score(model: Translator, source: torch.Tensor, found: list[int]) -> float:
    """log p / length of a finished translation."""
    target = torch.tensor([[START, *found]])
    logs = torch.log_softmax(model.decode(target, *model.encode(source))[0].double(), -1)[0]
    return float(logs[range(len(found) + 1), [*found, END]].sum()) / (len(found) + 1)


@torch.no_grad()
def test_one_beam_is_greedy_and_more_are_no_worse_where_both_end() -> None:
    model = build("smoe+similarity")
    model.bias.data[END] = 3.0  # translations end
    found = search(model, SOURCES)
    better = 0
    for place, row in enumerate(SOURCES):
        source = row[row >= 0][None]
        assert found[place] == greedy(model, source)
        wide = search(model, source, 6)[0]
        one, other = score(model, source, wide), score(model, source, found[place])
        assert one >= other - 1e-6
        better += one > other + 1e-6
    assert better


@pytest.mark.parametrize("router", ["expert-choice", "base"])
def test_a_router_that_looks_ahead_is_refused_in_the_decoder(router: str) -> None:
    with pytest.raises(ValueError, match=r"looks at later tokens.*; models of the family 'encoder-decoder' take none"):
        build(router)


@pytest.mark.parametrize("changes", [{"decoder_moe_layers": "1"}, {"decoder_moe_layers": "0", "decoder_layers": 1}])
def test_layers_without_feed_forward_are_the_decoders_too(changes: dict[str, Any]) -> None:
    allowed = {"moe_layers": "0", "decoder_moe_layers": "0", "attention_only": (1,)}
    assert build(**allowed).config.decoder.layout.sparse == {0}
    with pytest.raises(ValueError, match=r"attention_only=\(1,\): the decoder has \d layers .* not allow layer 1"):
        build(**{**allowed, **changes})


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences whose translation is each word of the other language."""
    made, draw = tmp_path_factory.mktemp("pairs"), random.Random(0)
    words = ["".join(draw.choices("abcdefg", k=n % 4 + 2)) for n in range(20)]
    for stem, count in (("train", 120), ("val", 8), ("test_2016", 8)):
        rows = [[draw.randrange(20) for _ in range(draw.randint(2, 5))] for _ in range(count)]
        for language, form in (("de", lambda w: w), ("fr", lambda w: w + "x"), ("en", lambda w: w[::-1])):
            text = "".join(" ".join(form(words[n]) for n in row) + "\n" for row in rows)
            (made / f"{stem}.{language}").write_text(text.replace("\n", "\r\n") if language == "fr" else text)
    return made


@pytest.fixture
def settings(folder: Path) -> Callable[..., RunConfig]:
    def make(router: str = "switch", **changes: Any) -> RunConfig:
        model = TranslationConfig(
            vocab_size=100, num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=24, num_experts=4, router=router,
            dropout=0.1, max_length=24,
        )  # fmt: skip
        config = RunConfig.of(
            model=model, data=f"parallel:{folder}:from=de+fr:to=en", steps=4, batch_size=8, segment_length=24,
            memory_length=0, eval_batch_size=8, train_top_k="1", pieces=50, learning_rate=3e-3, label_smoothing=0.1,
            accumulation=2, validate_every=2, checkpoint_every=2, keep_checkpoints=3, eval_top_k=(1, 4), beam=2,
            lr_schedule="inverse-sqrt", warmup_steps=2, valid_tokens=80,
        )  # fmt: skip
        return config.with_overrides(changes)

    return make


def test_a_run_is_judged_by_bleu_and_resumes_bit_for_bit(
    settings: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings()
    whole = train(config, tmp_path / "whole").evaluation
    first = whole["results"][0]
    assert (first["metric"], first["split"], list(first["languages"])) == ("bleu", "test", ["de", "fr"])
    assert 0 <= first["value"] <= 100
    assert "tok:13a" in first["signature"][0]
    [folder] = (tmp_path / "whole/predictions").iterdir()
    assert len((folder / "test-translations.de-en.txt").read_text().splitlines()) == 8
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/checkpoints/step-4")
    (tmp_path / "cut/evaluation.json").unlink()
    assert train(config, tmp_path / "cut", resume=True).evaluation["results"] == whole["results"]
    one, two = ((tmp_path / name / "checkpoints/step-4/model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == two
    valid = ["evaluate", str(tmp_path / "cut"), "--top-k", "1", "--split", "valid"]
    assert main([*valid, "--predictions", "official"]) == 0
    assert "bleu" in capsys.readouterr().out
    kept = {"test-translations", "test-references", "valid-translations", "valid-references"}
    assert {file.name.partition(".")[0] for file in (tmp_path / "cut/predictions").glob("*/*.de-en.txt")} == kept
    [file] = (tmp_path / "cut").glob("evaluation-*-valid.json")
    assert json.loads(file.read_text())["results"][0]["languages"]["fr"]["sentences"] == 8


def test_both_sides_are_diagnosed_without_padding_and_by_language(
    settings: Callable[..., RunConfig], tmp_path: Path
) -> None:
    from pointsman_lab.diagnosis import Settings, diagnose_path
    from pointsman_lab.report.samples import collect_samples

    every = {"model.moe_layers": "every:1", "model.decoder_moe_layers": "every:1"}
    evaluation = train(settings("xmoe", **every), tmp_path / "run").evaluation
    found = diagnose_path(tmp_path / "run", settings=Settings(tokens=None))
    assert found["groups"] == ["de", "fr"]
    pairs = open_parallel(settings().data).parts["test"]
    run = load_run(tmp_path / "run")
    encoded = [[len(ended(run.vocabulary.encode(text), 24)) for text in pair] for of in pairs.values() for pair in of]
    tokens = {name: layer["load"]["tokens"] for name, layer in found["layers"].items()}
    assert {name.partition(".")[0] for name in tokens} == {"encoder", "decoder"}
    for name, count in tokens.items():
        assert count == sum(one[name.startswith("decoder")] for one in encoded)  # <s> stands for the target's end
        assert found["layers"][name]["group"]["corrected"] is not None
        assert found["layers"][name]["jacobian"]["gradient"] is not None
    assert found["protocol"]["tokens"] == sum(map(sum, encoded))
    name = next(iter(tokens))
    for result in evaluation["results"]:
        entropy = found["layers"][name]["entropy"]["mean"]
        assert result["routers"][name]["entropy"] == pytest.approx(entropy, rel=1e-5), "padding does not count"
    assert [row["checkpoint"] for row in found["history"]] == ["step-2"]
    assert all(0 <= layer["fluctuation"]["top1"] <= 1 for layer in found["history"][0]["layers"].values())
    file = collect_samples(tmp_path / "run", tokens=40, points=10)
    assert file is not None
    sample = json.loads(file.read_text())
    assert sample["layers"] == [name for name in tokens if name.startswith("encoder")]
    assert 30 <= len(sample["tokens"]) <= 80


def test_targets_are_inputs_one_step_later(settings: Callable[..., RunConfig]) -> None:
    config = settings()
    inputs, targets = pretraining_task(config).batches(config, torch.device("cpu")).batch(0)
    assert inputs.shape == (8, 2, targets.shape[1])
    for (_, given), wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        real = [one for one in wanted if one >= 0]
        assert real[-1] == END
        assert given[: len(real)] == [START, *real[:-1]]
        assert set(given[len(real) :]) <= {-1}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("multi30k", "set POINTSMAN_DATA"),
        ("stdlib", "a translation model reads multi30k, parallel:PATH or wmt:FOLDER; allowed"),
        ("parallel:FOLDER:from=cs", "has no train.cs"),
        ("parallel:FOLDER:from=en", "other languages than the target"),
        ("parallel:FOLDER:form=de", "option 'form'"),
        ("parallel:FOLDER:from=de:from=fr", "from is given twice"),
        ("parallel:FOLDER:from=de+de", "'de' is named twice"),
        ("parallel:/nowhere:from=de", "there is no folder"),
    ],
)
def test_what_is_refused(folder: Path, spec: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POINTSMAN_DATA", raising=False)
    with pytest.raises(RunError, match=words):
        open_parallel(spec.replace("FOLDER", str(folder)))


def test_the_current_folder_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert open_parallel("parallel:.:from=de").name == f"{folder.name}:from=de:to=en"


def test_pairs_that_are_cut_are_counted(
    settings: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(segment_length=8, steps=1)
    pairs = open_parallel(config.data).parts
    task: Any = pretraining_task(config)
    pieces = task.vocabulary

    def longer(texts: Iterable[str]) -> int:
        return sum(len(pieces.encode(text)) + 1 > 8 for text in texts)

    wanted = sum(longer(pair) > 0 for of in pairs["train"].values() for pair in of)
    task.batches(config, torch.device("cpu"))
    assert task.notes == (f"{task.name} train: {wanted} of 240 pairs cut to 8 pieces",)
    languages = train(config, tmp_path / "run").evaluation["results"][0]["languages"]
    assert [row["cut"] for row in languages.values()] == [longer(one for one, _ in of) for of in pairs["test"].values()]
    assert 0 < wanted < 240


def test_bleu_splits_words_as_the_target_language_is_written() -> None:
    found, right = ["我喜欢苹果和香蕉。"], [["我喜欢苹果和梨。"]]
    assert [scorers(target)[0].corpus_score(found, right).score > 30 for target in ("zh", "en")] == [True, False]


def test_a_tokenizer_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: object) -> None:
        raise RuntimeError("Japanese tokenization requires extra dependencies\nPlease install them like so.")

    monkeypatch.setattr("sacrebleu.metrics.bleu.BLEU", missing)
    with pytest.raises(RunError, match=r"BLEU of 'ja' needs a tokenizer: pip install 'sacrebleu\[ja\]'"):
        scorers("ja")


def test_training_does_not_begin_without_its_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    task = SimpleNamespace(text=SimpleNamespace(target="en"))
    with pytest.raises(RunError, match=r"BLEU needs sacrebleu: pip install 'pointsman\[translate\]'"):
        Translation.objective(task, None, None)  # type: ignore[arg-type]


def test_parts_that_are_no_pairs_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "odd")
    file = tmp_path / "odd/val.de"
    file.write_text(file.read_text() + "more\n")
    with pytest.raises(RunError, match=r"val.de has 9 lines, and .*val.en 8"):
        open_parallel(f"parallel:{tmp_path / 'odd'}:from=de")
    file.write_text("\n" + "".join(file.read_text().splitlines(keepends=True)[:7]))
    with pytest.raises(RunError, match=r"val.de: line 1 is empty"):
        open_parallel(f"parallel:{tmp_path / 'odd'}:from=de")
    for name in ("train.de", "train.en"):
        (tmp_path / "odd" / name).write_text("")
    with pytest.raises(RunError, match=r"train.de has no text"):
        open_parallel(f"parallel:{tmp_path / 'odd'}:from=de")


def wmt(folder: Path, sizes: dict[str, int]) -> Path:
    """Bitexts with English sides of their own, and tests of different years."""
    folder.mkdir()
    for language, size in sizes.items():
        stems = {"train": size, "valid": 3, f"newstest20{10 + len(language) + size % 7}": 4}
        for stem, count in stems.items():
            for side in (language, "en"):
                lines = [f"{stem} {side} {language} a{n % 9}b c{n % 5}d" for n in range(count)]
                (folder / f"{stem}.{language}-en.{side}").write_text("\n".join(lines) + "\n")
    return folder


def test_wmt_has_an_english_side_for_each_language(tmp_path: Path) -> None:
    folder = wmt(tmp_path / "wmt", {"fr": 400, "cs": 100, "hi": 20})
    with (folder / "train.hi-en.hi").open("a") as one, (folder / "train.hi-en.en").open("a") as other:
        one.write("\n")
        other.write("nothing said\n")
    text = open_parallel(f"wmt:{folder}")
    assert {language: len(pairs) for language, pairs in text.parts["train"].items()} == {"cs": 100, "fr": 400, "hi": 20}
    assert all(other.split()[1:3] == ["en", "fr"] for _, other in text.parts["train"]["fr"])
    assert "hi: 1 training pairs with an empty side left out, test newstest2018.hi-en" in text.description
    assert list(open_parallel(f"wmt:{folder}:from=hi+fr").parts["test"]) == ["hi", "fr"]
    config = preset("tiny-mt", data=f"wmt:{folder}").with_overrides({"pieces": 27, "batch_size": 20})
    task: Any = pretraining_task(config)
    batches = task.batches(config, torch.device("cpu"))
    assert [task._budget(tokens, "test") for tokens in (None, 120, 5)] == [None, 2, 1], "of each of three languages"
    assert batches.steps_per_epoch == 26
    drawn = np.concatenate([batches.places(step) for epoch in range(3) for step in range(26 * epoch, 26 * epoch + 26)])
    counts = np.histogram(drawn, [0, 100, 500, 520])[0] / len(drawn)
    wanted = np.array([100, 400, 20]) ** 0.7
    assert np.allclose(counts, wanted / wanted.sum(), atol=0.01)
    assert len(set(drawn.tolist())) > 510, "rare pairs come again, none is left out for good"
    (folder / "newstest2019.fr-en.fr").write_text("x\n")
    with pytest.raises(RunError, match=r"fr has two test parts, newstest20.*fr-en and newstest2019.fr-en"):
        open_parallel(f"wmt:{folder}")
    (folder / "newstest2019.fr-en.fr").unlink()
    with pytest.raises(RunError, match=r"no train part of de into en: train.de-en.de is expected"):
        open_parallel(f"wmt:{folder}:from=de")
