"""Masked language modelling from a folder of text to a table, and what it refuses."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentencepiece")

from pointsman._errors import RunError
from pointsman.recording import record_routing
from pointsman_lab.cli.main import main
from pointsman_lab.data import pieces
from pointsman_lab.evaluation.passes import PLAIN
from pointsman_lab.models.encoder import EncoderConfig
from pointsman_lab.tasks.masked_language_modelling import task as masked_language_model
from pointsman_lab.tasks.masked_language_modelling import text as texts
from pointsman_lab.tasks.masked_language_modelling.blocks import Masking
from pointsman_lab.tasks.masked_language_modelling.task import MaskedLanguageModelling, _pooled, masked_batches
from pointsman_lab.tasks.masked_language_modelling.text import open_blocks
from pointsman_lab.training.compare import Plan, compare
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.directory import RunDirectory
from pointsman_lab.training.run import load_run
from pointsman_lab.training.state import TrainingState
from pointsman_lab.training.task import pretraining_task
from pointsman_lab.training.trainer import train


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in two languages."""
    made = tmp_path_factory.mktemp("texts")
    for seed, (language, count) in enumerate((("aa", 1600), ("bb", 900))):
        draw = random.Random(seed)
        words = ["".join(draw.choices("abcdefghijklmno", k=draw.randint(2, 7))) for _ in range(80)]
        lines = [" ".join(draw.choices(words, k=draw.randint(3, 12))) + "." for _ in range(count)]
        (made / f"{language}.txt").write_text("\n".join(lines))
    return made


@pytest.fixture
def masked(folder: Path) -> Callable[..., RunConfig]:
    """masked(router, key=value) -> settings of a run of 6 short steps."""

    def make(router: str = "smoe:balance=0.01", **changes: Any) -> RunConfig:
        model = EncoderConfig(
            vocab_size=200, num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=24, num_experts=4, router=router,
            moe_layers="after:1", norm="pre", dropout=0.0, attention_dropout=0.0, max_length=32,
        )  # fmt: skip
        config = RunConfig.of(
            model=model, data=f"multilingual:{folder}", steps=6, batch_size=8, segment_length=32, memory_length=0,
            eval_batch_size=16, eval_tokens=1024, valid_tokens=1024, train_top_k="2", pieces=150, learning_rate=3e-3,
            validate_every=3, checkpoint_every=3, keep_checkpoints=3, log_every=1,
        )  # fmt: skip
        return config.with_overrides(changes)

    return make


Make = Callable[..., RunConfig]


def test_a_run_is_judged_by_language_and_resumes_bit_for_bit(masked: Make, tmp_path: Path) -> None:
    config = masked()
    result = train(config, tmp_path / "whole")
    first = result.evaluation["results"][0]
    assert [row["top_k"] for row in result.evaluation["results"]] == [1, 2, 4]
    assert (first["split"], first["metric"]) == ("valid", "perplexity")
    assert set(first["languages"]) == {"aa", "bb"}
    assert 0 < first["nats_per_character"] < first["nats"]
    assert "masked" in result.evaluation["protocol"]
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/checkpoints/step-6")
    (tmp_path / "cut/evaluation.json").unlink()
    again = train(config, tmp_path / "cut", resume=True)
    assert again.evaluation["results"] == result.evaluation["results"]
    one, two = ((tmp_path / name / "checkpoints/step-6/model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == two
    assert train(config, tmp_path / "cut", resume=True).already_finished


def test_a_saved_run_is_evaluated_on_its_own_and_on_other_text(
    masked: Make, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(masked(), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert RunDirectory(tmp_path / "run").vocabulary() == run.vocabulary
    other = f"multilingual:{folder}:languages=bb"
    assert main(["evaluate", str(tmp_path / "run"), "--data", other, "--top-k", "1"]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert set(run.task(other).text.valid) == {"bb"}  # type: ignore[attr-defined]
    assert main(["evaluate", str(tmp_path / "run"), "--split", "test"]) == 2
    assert "allowed is valid" in capsys.readouterr().err
    namesake = tmp_path / folder.name
    shutil.copytree(folder, namesake)
    for file in namesake.rglob("*bb*"):
        file.write_text(file.read_text().replace("a", "b"))
    [before] = (tmp_path / "run").glob("evaluation-*.json")
    content = before.read_bytes()
    other = f"multilingual:{namesake}:languages=bb"
    assert main(["evaluate", str(tmp_path / "run"), "--data", other, "--top-k", "1"]) == 2
    assert "is of other data of the name" in capsys.readouterr().err
    assert before.read_bytes() == content


def test_a_run_is_diagnosed_and_shown_token_by_token(masked: Make, tmp_path: Path) -> None:
    import json

    from pointsman_lab.diagnosis import Settings, diagnose_path
    from pointsman_lab.report.samples import collect_samples
    from pointsman_lab.report.summary import summary

    train(masked("xmoe"), tmp_path / "run")
    found = diagnose_path(tmp_path / "run", settings=Settings(tokens=600))
    [layer] = found["layers"].values()
    assert found["groups"] == ["aa", "bb"]
    assert layer["group"]["ids"] == 2  # I(expert; language)
    assert layer["collapse"]["value"] > 0
    assert [row["checkpoint"] for row in found["history"]] == ["step-3"]
    assert 0 <= found["history"][0]["layers"]["inserted.moe"]["fluctuation"]["top1"] <= 1
    assert "I(expert; language)" in summary(found)
    file = collect_samples(tmp_path / "run", tokens=128)
    assert file is not None
    sample = json.loads(file.read_text())
    assert (sample["split"], sample["level"]) == ("valid", "piece")
    assert len(sample["tokens"]) > 32


def test_perplexity_is_that_of_the_logits(masked: Make) -> None:
    config = masked()
    task = pretraining_task(config)
    assert isinstance(task, MaskedLanguageModelling)
    config = task.prepared(config)
    model, text = task.build_model(config).eval(), task.text
    shares = pieces.shares(text.sizes, config.own["language_exponent"])
    [result] = task.evaluate(model, replace(config, eval_tokens=None), "valid", [2], PLAIN)
    nats, letters, load, read = {}, {}, torch.zeros(4), 0
    for language in shares:
        found, characters = [], 0
        for batch in masked_batches(text, 8, "cpu"):
            if batch.group == list(text.valid).index(language):
                for row, target in zip(batch.inputs, batch.targets, strict=True):
                    at = target >= 0
                    with record_routing(model) as records:
                        logits = model(row[row >= 0][None])[0][at[row >= 0]]
                    load += torch.bincount(records["inserted.moe"].experts.flatten(), minlength=4)
                    read += int((row >= 0).sum())
                    found.append(torch.nn.functional.cross_entropy(logits.double(), target[at], reduction="none"))
                    characters += int(text.pieces.characters[target[at].numpy()].sum())
        nats[language] = float(torch.cat(found).detach().mean())
        letters[language] = characters / len(torch.cat(found))
        assert result["languages"][language]["nats"] == pytest.approx(nats[language], rel=1e-5)
    assert result["tokens"] == read
    assert result["routers"]["inserted.moe"]["load"] == pytest.approx((load / load.sum()).tolist(), abs=1e-3)
    pooled = sum(shares[one] * nats[one] for one in shares)
    assert result["nats"] == pytest.approx(pooled, rel=1e-5)
    assert result["value"] == pytest.approx(torch.tensor(pooled).exp().item(), rel=1e-4)
    expected = pooled / sum(shares[one] * letters[one] for one in shares)
    assert result["nats_per_character"] == pytest.approx(expected, rel=1e-5)


def test_languages_without_a_masked_piece_leave_their_share_to_the_others() -> None:
    sums = {"aa": torch.tensor([6.0, 9.0, 3.0]), "bb": torch.tensor([8.0, 2.0, 2.0]), "cc": torch.zeros(3)}
    found = _pooled(sums, {"aa": 0.25, "bb": 0.25, "cc": 0.5})  # nats, characters, pieces
    assert (found["nats"], found["nats_per_character"], found["masked"]) == (3.0, 3.0 / 2.0, 5)


def test_text_of_which_nothing_is_masked_has_no_figure(masked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = masked()
    task = pretraining_task(config)
    assert isinstance(task, MaskedLanguageModelling)
    model = task.build_model(task.prepared(config))
    monkeypatch.setattr(masked_language_model, "SCORED", Masking(rate=0.0))
    with pytest.raises(RunError, match="none of its tokens is masked"):
        task.evaluate(model, config, "valid", [2], PLAIN)


def test_micro_batches_count_by_their_targets(masked: Make) -> None:
    """The gradient of 4 micro-batches with different numbers of targets is that of the whole batch."""
    gradients = []
    for accumulation in (1, 4):
        config = masked("plain", accumulation=accumulation)
        task = pretraining_task(config)
        state = TrainingState(task.prepared(config), task, torch.device("cpu"))
        state.model.train()
        batches = state._micro_batches()
        assert accumulation == 1 or len({int((targets >= 0).sum()) for _, targets in batches}) > 1
        gradients.append(_gradient(state))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def _gradient(state: TrainingState) -> torch.Tensor:
    mean, _, _ = state._pass(state._micro_batches(), None)
    every = [parameter.grad.flatten() for parameter in state.parameters.values() if parameter.grad is not None]
    return torch.cat([mean.reshape(1), *every])


def test_routers_of_a_comparison_see_the_same_masks(masked: Make, tmp_path: Path) -> None:
    from pointsman_lab.progress import Quiet
    from pointsman_lab.report.tables import ComparisonTable

    plan = Plan(masked(steps="2"), ("plain", "xmoe", "thor"), (0,))
    compare(plan, tmp_path / "out", progress=Quiet())
    text = ComparisonTable.read(tmp_path / "out").text()
    assert "perplexity on the valid split" in text
    task = pretraining_task(plan.base)
    one, two = (task.batches(plan.config(router, 0), torch.device("cpu")).batch(3) for router in plan.routers[:2])
    assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))


def test_blocks_are_cached_and_a_damaged_cache_is_made_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = open_blocks(f"multilingual:{folder}", length=32, size=150)
    [file] = (tmp_path / "pointsman/blocks").iterdir()
    with monkeypatch.context() as within:
        within.setattr(texts, "read_text", None)
        again = open_blocks(f"multilingual:{folder}", length=32, size=150)
    assert (again.fingerprint, again.note, again.description) == (made.fingerprint, made.note, made.description)
    file.write_bytes(file.read_bytes()[:-40])
    assert open_blocks(f"multilingual:{folder}", length=32, size=150).fingerprint == made.fingerprint


def test_cached_blocks_are_not_those_of_other_text_of_the_same_size_and_time(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "texts")
    made = open_blocks(f"multilingual:{tmp_path / 'texts'}", length=32, size=150)
    text = tmp_path / "texts" / "aa.txt"
    before = text.stat().st_mtime_ns
    text.write_text(text.read_text().upper())
    os.utime(text, ns=(before, before))  # as `cp -p` leaves it
    assert open_blocks(f"multilingual:{tmp_path / 'texts'}", length=32, size=150).fingerprint != made.fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "stdlib"}, "multilingual:PATH or xtreme-text"),
        ({"data": "multilingual:/nowhere"}, "there is no folder /nowhere"),
        ({"data": "multilingual:"}, "a masked language model reads multilingual:PATH or xtreme-text"),
        ({"mask_rate": "0"}, "mask_rate=0"),
        ({"mask_rate": "2"}, "allowed are numbers from 0 to 1"),
        ({"random_share": "0.5"}, "mask_token_share 0.8 and random_share 0.5 are above 1 together"),
        ({"segment_length": "64"}, "model.max_length is 32"),
        ({"pieces": "18"}, "18 pieces cannot be trained"),
    ],
)
def test_what_is_refused_is_one_line(masked: Make, changes: dict[str, str], words: str) -> None:
    with pytest.raises(RunError, match=words) as error:
        pretraining_task(masked(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["fr.tsv", "es.TXT", "de/train.tsv"])
def test_a_file_that_is_no_text_of_a_language_is_named(name: str, tmp_path: Path) -> None:
    for other in ("en.txt", ".hidden", "README.md", "LICENSE"):
        (tmp_path / other).write_text("a b\n")
    assert list(texts.read_text(f"multilingual:{tmp_path}").train) == ["en"]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("c d\n")
    with pytest.raises(RunError, match=f"{name.partition('/')[0]} is none of LANG.txt, LANG.txt.gz and LANG/train.txt"):
        texts.read_text(f"multilingual:{tmp_path}")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("languages=", "languages='': a value is missing"), ("languages=aa+", "no text in ''"),
        ("languages=aa+bb+aa", "'aa' is named twice"),
        ("language=en", "unknown option 'language': did you mean 'languages'"),
        ("languages=en:languages=de", "languages is given twice"),
    ],
)  # fmt: skip
def test_options_of_a_text(option: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert texts.read_text("multilingual:.").name == folder.name
    with pytest.raises(RunError, match=words):
        texts.read_text(f"multilingual:{folder}:{option}")


def test_tagged_sentences_in_xtremes_own_form_are_text(tmp_path: Path) -> None:
    (tmp_path / "udpos").mkdir()
    (tmp_path / "udpos/train-en.tsv").write_text("Dogs\tNOUN\nbark\tVERB\n\n")
    (tmp_path / "udpos/test-en.tsv").write_text("Birds\tNOUN\nsing\tVERB\n\n")
    assert texts.read_text("xtreme-text", tmp_path).train == {"en": ("Dogs bark", "")}
    (tmp_path / "udpos/en_x-ud-train.conllu").write_text("# text = Cats sleep\n1\tCats\t_\tNOUN" + "\t_" * 6 + "\n\n")
    assert texts.read_text("xtreme-text", tmp_path).train == {"en": ("Cats sleep", "")}, "as it was written"


def test_an_encoder_needs_no_language_it_has_no_text_in(masked: Make, folder: Path) -> None:
    config = masked()
    with pytest.raises(RunError, match="no text in 'cc'"):
        pretraining_task(replace(config, data=f"multilingual:{folder}:languages=cc"))
