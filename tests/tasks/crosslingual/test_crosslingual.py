"""XTREME's tasks on a small encoder: rows and back, scores, floors, tables, frozen parts, and what is refused."""

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tasks.crosslingual.fixtures import WORDS, pretrained, sentence, write_data

pytest.importorskip("sentencepiece")

from pointsman._errors import RunError
from pointsman_lab.cli.main import main
from pointsman_lab.data.pieces import Pieces, train_pieces
from pointsman_lab.data.task_streams import Encoded
from pointsman_lab.finetuning import Finetuning, finetune
from pointsman_lab.models.encoder import EncoderConfig
from pointsman_lab.recipes import preset
from pointsman_lab.tasks.crosslingual import evaluation
from pointsman_lab.tasks.crosslingual.data import floors, groups_of, load_xtreme
from pointsman_lab.tasks.crosslingual.evaluation import Features, answer, features, nats_of, table
from pointsman_lab.tasks.crosslingual.formats import Pair, Question, Tagged
from pointsman_lab.tasks.crosslingual.scores import Score, mean_error, resampled, score
from pointsman_lab.tasks.crosslingual.task import CrossLingual, TokenClassifier, submission
from pointsman_lab.tasks.crosslingual.xtreme import PANX_TAGS
from pointsman_lab.training.directory import RunDirectory
from pointsman_lab.training.run import load_run

TAGS = {tag: place for place, tag in enumerate(PANX_TAGS)}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def pieces() -> Pieces:
    draw = random.Random(1)
    return train_pieces([sentence(draw) + "." for _ in range(600)], 96)


@pytest.fixture(scope="session")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-trained encoder."""
    return pretrained(data, tmp_path_factory.mktemp("runs") / "mlm")


def test_words_and_tags_come_back_from_rows_of_any_length(pieces: Pieces) -> None:
    draw = random.Random(2)
    items = [Tagged(tuple(draw.choices(WORDS, k=n)), tuple(draw.choices(PANX_TAGS, k=n))) for n in (1, 5, 30, 60)]
    items.append(Tagged(("", "☃"), ("O", "B-PER")))
    made = features(items, pieces, 20, TAGS)
    assert max(map(len, made.encoded.rows)) <= 20
    for number, item in enumerate(items):
        rows = [row for row, owner in enumerate(made.items) if owner == number]
        tags = [PANX_TAGS[tag] for row in rows for tag in made.encoded.labels[row][made.words[row]]]
        assert tuple(tags) == item.tags
        text = [i for row in rows for i in made.encoded.rows[row][1:-1].tolist()]
        if number < 4:
            assert text == [i for word in item.words for i in pieces.encode(word).tolist()]
    assert (made.encoded.labels != -100).sum() == sum(len(item.words) for item in items)


def test_the_longer_sentence_of_a_pair_is_cut(pieces: Pieces) -> None:
    long, short = " ".join(WORDS), WORDS[0]
    made = features([Pair(long, short, "a"), Pair(short, long, "b"), Pair(long, long, "a")], pieces, 24,
                    {"a": 0, "b": 1})  # fmt: skip
    assert made.encoded.truncated == 3
    ends = [np.flatnonzero(row == 2).tolist() for row in made.encoded.rows]
    kept = len(pieces.encode(short))
    assert [len(row) for row in made.encoded.rows] == [24] * 3
    assert ends[0] == [21 - kept - 0, 22 - kept, 23]
    assert ends[1] == [1 + kept, 2 + kept, 23]
    assert ends[2] == [11, 12, 23]


def test_windows_cover_every_piece_and_answers_are_substrings(pieces: Pieces) -> None:
    draw = random.Random(3)
    context = " ".join(draw.choices(WORDS, k=120))
    right = " ".join(context.split()[70:72])
    item = Question("q", context, "ab cd", ((right, context.index(right)),))
    made = features([item], pieces, 40, {})
    _, places = pieces.encode_with_offsets(context)
    covered = np.concatenate([at[at[:, 0] >= 0] for at in made.offsets])
    assert {tuple(place) for place in covered.tolist()} == {tuple(place) for place in places.tolist()}
    assert len(made.encoded.rows) > 3
    labels = made.encoded.labels
    assert (labels[:, 0] > 0).any()
    for row, at, (first, last) in zip(made.encoded.rows, made.offsets, labels.tolist(), strict=True):
        if first:
            assert right in context[at[first, 0] : at[last, 1]]
        else:
            assert row[first] == 0
    logits = [np.random.default_rng(n).normal(size=(2, len(at))) for n, at in enumerate(made.offsets)]
    for n, (first, last) in enumerate(labels.tolist()):
        if first:
            logits[n][0, first] = logits[n][1, last] = 50.0
    found = answer(item, list(zip(logits, made.offsets, strict=True)))
    assert found == context[covered_text(made.offsets, labels)].strip()


def covered_text(offsets: object, labels: np.ndarray) -> slice:
    row = int(np.flatnonzero(labels[:, 0])[0])
    first, last = labels[row]
    return slice(offsets[row][first, 0], offsets[row][last, 1])  # type: ignore[index]


def test_scores_are_ratios_and_their_errors_those_of_groups() -> None:
    pairs = [Pair(f"p{n // 3}", f"h{n}", "yes") for n in range(30)]
    given = ["yes" if n % 2 else "no" for n in range(30)]
    found = score("xnli", "en", pairs, given, groups_of(pairs))
    assert found.value == 0.5
    counts = np.array([(one == "yes", 1.0) for one in given])
    np.testing.assert_array_equal(found.drawn, resampled(counts, groups_of(pairs)))
    assert set(resampled(counts[1:2], ["p0"])) == {1.0}  # a third of the resamples is empty
    assert 0.02 < found.error < 0.2
    same = score("xnli", "de", pairs, given, groups_of(pairs))
    assert mean_error([found, same]) == pytest.approx(found.error)  # translations of the same items
    apart = (Score(0.5, np.array(drawn), {}) for drawn in ([0.0, 1.0], [1.0, 0.0]))
    assert mean_error(list(apart)) == 0, "errors that cancel out"
    untagged = [Tagged(("a", "b", "c"), ("DET", "_", "VERB"))]
    assert score("udpos", "en", untagged, [("DET", "X", "NOUN")], groups_of(untagged)).value == 0.5
    tagged = [Tagged(("a", "b", "c"), ("B-PER", "I-PER", "O"))]
    entity = score("panx", "en", tagged, [("B-PER", "I-PER", "B-LOC")], groups_of(tagged))
    assert entity.value == pytest.approx(2 / 3)
    assert entity.others["accuracy"] == pytest.approx(2 / 3)
    asked = [Question("1", "the cat sat", "who", (("cat", 4),))]
    answered = score("tydiqa", "de", asked, ["the cat"], groups_of(asked))
    assert (answered.value, answered.others["exact"]) == (1.0, 1.0)


def test_the_transfer_is_the_mean_of_the_other_languages() -> None:
    part = evaluation.TestPart(
        [Pair("a", "b", "yes")], Features(Encoded((np.array([1]),), np.array([0]), 0), np.array([0])), ["a"]
    )
    values = {"en": 0.9, "de": 0.6, "fr": 0.3}
    scores = {language: Score(value, np.array([value, value]), {}) for language, value in values.items()}
    found = table(scores, dict.fromkeys(values, part))
    assert (found["value"], found["transfer"], found["gap"]) == pytest.approx((0.6, 0.45, 0.45))
    logits = torch.tensor([[[0.0, 0.0], [9.0, -9.0], [0.0, 0.0]]])
    nats, count = nats_of(logits, torch.tensor([[1, -100, 0, -100]]), "tags")
    assert (nats, count) == (pytest.approx(2 * math.log(2)), 2)


def test_an_answer_has_thirty_pieces_at_most() -> None:
    places = np.stack([np.arange(40), np.arange(1, 41)], 1)
    logits = np.zeros((2, 40))
    logits[0, 2], logits[1, 31], logits[1, 32] = 9.0, 5.0, 8.0
    text = "".join(chr(48 + place) for place in range(40))
    assert answer(Question("1", text, "", (("", 0),)), [(logits, places)]) == text[2:32]


def test_translations_are_resampled_together(tmp_path: Path, pieces: Pieces, run: Path) -> None:
    """English pairs share sentences, their translations do not, and lack rows."""
    draw = random.Random(4)
    shared = [sentence(draw, 9, 9) for _ in range(30)]
    (tmp_path / "pawsx").mkdir()
    for language in ("en", "de"):
        rows = [(shared[n // 4] if language == "en" else f"{n} {sentence(draw)}", sentence(draw)) for n in range(120)]
        if language == "de":
            rows[::7] = [("NS", second) for _, second in rows[::7]]
        lines = [f"{first}\t{second}\t{n % 2}" for n, (first, second) in enumerate(rows)]
        (tmp_path / f"pawsx/dev-{language}.tsv").write_text("\n".join(lines) + "\n")
    found = load_xtreme("pawsx-dev", tmp_path)
    assert found.groups["en"] == groups_of(found.tests["en"])
    group = {item.row: name for item, name in zip(found.tests["en"], found.groups["en"], strict=True)}  # type: ignore[union-attr]
    assert found.groups["de"] == [group[item.row] for item in found.tests["de"]]  # type: ignore[union-attr]
    assert len(set(found.groups["de"])) < len(found.tests["de"]) < len(found.tests["en"])

    def answer(row: int) -> str:
        """Right for all of a group, or for half of it."""
        return str(row % 2) if row // 4 % 3 else "0"

    one, two = (
        score("pawsx-dev", language, items, [answer(item.row) for item in items], found.groups[language])  # type: ignore[union-attr]
        for language, items in found.tests.items()
    )
    assert np.corrcoef(one.drawn, two.drawn)[0, 1] > 0.8
    assert mean_error([one, two]) > 0.9 * one.error
    config = replace(RunDirectory(run).config(), segment_length=48, eval_tokens=400)
    parts = CrossLingual(found, Finetuning("pawsx-dev"), pieces, None).parts(config, "test")
    english, german = ([item.row for item in parts[language].items] for language in ("en", "de"))
    assert 0 < len(english) < 30
    assert german == [row for row in english if row % 7]


def test_mlqa_is_scored_by_its_own_rules_as_xtreme_does() -> None:
    asked = [Question("1", "die Katze saß", "wer", (("Katze", 4),)), Question("2", "das Haus", "was", (("Haus", 4),))]
    given = ["die Katze", "the Haus"]
    found = score("mlqa", "de", asked, given, groups_of(asked))
    assert (found.value, found.others["exact"]) == pytest.approx(((1 + 2 / 3) / 2, 0.5))
    assert score("xquad", "de", asked, given, groups_of(asked)).value == pytest.approx((2 / 3 + 1) / 2)


def test_floors_need_no_model() -> None:
    train_pairs = [Pair("x", "no never", "contradiction"), Pair("y", "yes indeed", "entailment")] * 3
    found = floors("xnli", train_pairs, [Pair("z", "never", "contradiction"), Pair("z", "indeed", "entailment")])
    assert list(found["second sentence alone"]) == ["contradiction", "entailment"]
    rows = [Tagged(("New", "York", "runs"), ("B-LOC", "I-LOC", "O"))]
    assert floors("panx", rows, [Tagged(("in", "New", "York"), ("O", "O", "O"))])["gazetteer"] == [
        ["O", "B-LOC", "I-LOC"]
    ]
    upos = floors("udpos", [Tagged(("a", "b"), ("DET", "VERB"))], [Tagged(("b", "z"), ("VERB", "X"))])
    assert upos["commonest tag"] == [["VERB", "NOUN"]]
    asked = [Question("1", "Dogs bark. Cats sleep all day.", "when do cats sleep", (("day", 26),))]
    assert floors("tydiqa", [], asked)["nearest sentence"] == ["Cats sleep all day."]


@pytest.mark.parametrize("spans", [False, True])
def test_padding_changes_no_logit_of_a_token_head(spans: bool) -> None:
    config = EncoderConfig(vocab_size=30, num_layers=1, dim=16, num_heads=2, head_dim=8, hidden_dim=24, num_experts=4,
                           router="xmoe", moe_layers="after:1", max_length=16)  # fmt: skip
    model = TokenClassifier(config, 2, spans=spans).eval()
    text = torch.tensor([[0, 5, 6, 7, 2]])
    padded = torch.cat([text, torch.full((1, 3), -1)], 1)
    one, two = model(text), model(padded)
    two = two[..., :5] if spans else two[:, :5]
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)


def test_a_length_above_the_runs_is_refused_before_it_trains(
    data: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_DATA", str(data))
    with pytest.raises(RunError, match=r"segment_length=100 \(--length\): model.max_length is 64"):
        finetune(run, Finetuning("tydiqa", steps=3, length=100), out=tmp_path / "tuned")
    with pytest.raises(RunError, match="segment_length=100"):
        finetune(run, Finetuning("tydiqa", steps=3, settings={"segment_length": "100"}), out=tmp_path / "tuned")


@pytest.mark.parametrize(("task", "metric"), [("xnli", "accuracy"), ("panx", "f1"), ("tydiqa", "f1")])
def test_a_fine_tuning_is_judged_in_every_language(
    data: Path, run: Path, task: str, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("POINTSMAN_DATA", str(data))
    settings = Finetuning(
        task, steps=3, length=32, freeze=("router", "experts"), balance=0.01, settings={"batch_size": 8}
    )
    result = finetune(run, settings, out=tmp_path / "tuned")
    row = result.evaluation["results"][0]
    assert row["metric"] == metric
    assert list(row["languages"]) == ["en", "de"]
    assert row["gap"] == pytest.approx(row["languages"]["en"]["value"] - row["transfer"])
    assert {"floor", "error", "unknown"} <= row["languages"]["de"].keys()
    ending = "json" if task == "tydiqa" else "tsv"
    written = (tmp_path / f"tuned/predictions/{task}/test-de.{ending}").read_text()
    items = load_xtreme(task, data).tests["de"]
    expected = {"xnli": len(items), "tydiqa": 1}.get(task, sum(len(i.words) + 1 for i in items if task == "panx"))
    assert len(written.splitlines()) == expected
    before = load_run(run).model.state_dict()
    after = _weights(tmp_path / "tuned")
    frozen = [name for name in before if name.startswith("inserted.")]
    assert frozen
    assert all(torch.equal(before[name], after[f"backbone.{name}"]) for name in frozen)
    assert any(not torch.equal(before[name], after[f"backbone.{name}"]) for name in before if "attention" in name)
    assert finetune(run, settings, out=tmp_path / "tuned").already_finished
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "tuned"), "--top-k", "1"]) == 0
    printed = capsys.readouterr().out
    assert "transfer" in printed
    assert "floor" in printed
    saved = json.loads((tmp_path / f"tuned/evaluation-{task}-test.json").read_text())["results"][0]
    assert saved["languages"] == row["languages"]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    [folder] = (run / "checkpoints").glob("step-*")
    return load_file(folder / "model.safetensors")


def test_english_alone_is_trained_on_and_validation_shares_no_group(data: Path) -> None:
    found = load_xtreme("tydiqa", data)
    assert all(item.id.startswith("en-train") for part in found.splits.values() for item in part)  # type: ignore[union-attr]
    one, other = (set(groups_of(found.splits[part])) for part in ("train", "valid"))
    assert not one & other
    trained = {text for part in found.splits.values() for item in part for text in (item.context, item.question)}  # type: ignore[union-attr]
    assert not trained & {item.question for items in found.tests.values() for item in items}  # type: ignore[union-attr]


def test_reported_sentences_that_are_trained_on_are_counted(data: Path) -> None:
    found = load_xtreme("panx-dev", data)
    known = {item.words for of in found.splits.values() for item in of}  # type: ignore[union-attr]
    same = sum(item.words in known for items in found.tests.values() for item in items)  # type: ignore[union-attr]
    assert f"reported, {same} of their sentences are in the English training set, too; trained" in found.description
    assert "of their sentences" not in load_xtreme("panx", data).description


def test_the_papers_preset_freezes_and_has_the_scripts_rates(run: Path, data: Path) -> None:
    config = RunDirectory(run).config()
    config = replace(config, model=replace(config.model, max_length=512))
    found = load_xtreme("panx", data)
    paper = Finetuning("panx", preset="finetune-xmoe")
    assert (paper.freeze, paper.balance) == (("router", "experts"), 0.01)
    made = paper.config(config, found, 0)
    assert (made.learning_rate, made.lr_schedule, made.decay, made.segment_length) == (2e-5, "linear", "decoupled", 128)
    assert made.train_top_k == "1"
    assert made.steps == 10 * -(-len(found.splits["train"]) // 32)
    assert paper.for_router("plain").freeze == ()
    free = Finetuning("panx", preset="finetune-xmoe", freeze=("none",))
    assert (free.freeze, free.variant) == ((), "panx,balance=0.01,finetune-xmoe")
    assert free.config(config, found, 0) == made
    assert Finetuning("panx", freeze=("none",)).variant == "panx"


def test_label_smoothing_over_places_is_refused(run: Path, data: Path, tmp_path: Path) -> None:
    settings = Finetuning("tydiqa", steps=1, length=48, settings={"label_smoothing": 0.1})
    with pytest.raises(RunError, match=r"label_smoothing=0.1: padding would count on questions; set 0"):
        finetune(run, settings, out=tmp_path / "out", data=load_xtreme("tydiqa", data))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("xnli:languages=en+xx", "no test part in 'xx'"),
        ("xnli:languages=de+de", "'de' is named twice"),
        ("xnli:lang=en", "unknown option 'lang'"),
        ("pawsx", "pawsx has no train part"),
    ],
)
def test_what_is_refused(data: Path, spec: str, words: str) -> None:
    with pytest.raises(RunError, match=words):
        load_xtreme(spec, data)


def test_a_test_part_without_rows_is_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "tydiqa").symlink_to(data / "tydiqa")
    (tmp_path / "mlqa").mkdir()
    with pytest.raises(RunError, match=r"mlqa-dev has no test part: .*mlqa .* has no file dev-context-LANG"):
        load_xtreme("mlqa-dev", tmp_path)
    shutil.copytree(data / "panx", tmp_path / "panx")
    (tmp_path / "panx/test-sw.tsv").write_text("\n")
    with pytest.raises(RunError, match=r"test part in 'sw' is empty in .*panx"):
        load_xtreme("panx", tmp_path)
    assert list(load_xtreme("panx:languages=en", tmp_path).tests) == ["en"]


def test_a_language_model_is_no_encoder() -> None:
    with pytest.raises(RunError, match="'transformer-xl' do not learn the task xnli; allowed are encoder"):
        Finetuning("xnli").check(preset("tiny"))
    with pytest.raises(RunError, match="finetune-xmoe"):
        Finetuning("sst2", preset="finetune-xmoe")
    with pytest.raises(RunError, match="pooling='mean' has no effect on panx, which reads every hidden state"):
        Finetuning("panx", pooling="mean").check(preset("tiny-mlm"))
    Finetuning("panx", pooling="first").check(preset("tiny-mlm"))  # as a record has it
    Finetuning("xnli", pooling="mean").check(preset("tiny-mlm"))
    assert submission([Pair("a", "b", "x")], ["x"]) == "x\n"
