"""Text attacks: exact rates, deterministic, clean vocabulary; and their evaluation."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from pointsman._errors import RunError
from pointsman_lab.data.vocabulary import IdArray, Vocabulary
from pointsman_lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from pointsman_lab.tasks.attacks.attacks import attack_part, attack_texts, change_under_attack, evaluate_attack
from pointsman_lab.tasks.attacks.table import Attack
from pointsman_lab.tasks.language_modelling.task import EvalProtocol, evaluate

TEXT = (
    " ".join(f"{'word' * (i % 3 + 1)}{chr(97 + i % 26)}\n" if i % 9 == 0 else f"Some{i}" for i in range(500)) + "  end"
)
BYTES = Vocabulary.of_bytes(TEXT.encode() + b"Axyz")
WORDS = Vocabulary("word", [*sorted(set(TEXT.split()) - {"Some1"}), "<eos>", "<unk>"])
VOCABULARIES = {"byte": BYTES, "word": WORDS}


def rows_of(vocabulary: Vocabulary) -> list[IdArray]:
    return [vocabulary.encode_compact(part)[0] for part in (TEXT[:1000], TEXT[1000:])]


@pytest.mark.parametrize("level", ["byte", "word"])
def test_the_rate_is_exact_and_the_choice_deterministic(level: str) -> None:
    vocabulary = VOCABULARIES[level]
    rows = rows_of(vocabulary)
    before = vocabulary.to_json()
    for rate in (0.0, 0.01, 0.025, 0.1, 0.333, 1.0):
        attack = Attack(rate, seed=5)
        one, other = attack_texts(rows, vocabulary, attack), attack_texts(rows, vocabulary, attack)
        assert one.chosen == round(rate * one.candidates)
        for row, again, source, clean in zip(one.rows, other.rows, one.sources, rows, strict=True):
            mark = source == -1
            assert np.array_equal(row, again)
            assert row.dtype == clean.dtype
            assert int(row.max()) < vocabulary.size
            assert np.array_equal(row[~mark], clean[source[~mark]])
            assert (np.diff(source[~mark]) > 0).all()
        if rate == 0:
            assert all(np.array_equal(row, clean) for row, clean in zip(one.rows, rows, strict=True))
    different = attack_texts(rows, vocabulary, Attack(0.1, seed=6))
    same = attack_texts(rows, vocabulary, Attack(0.1, seed=5))
    assert any(not np.array_equal(a, b) for a, b in zip(same.sources, different.sources, strict=True))
    assert vocabulary.to_json() == before


def test_words_in_bytes_are_swapped_as_in_the_text() -> None:
    rows = rows_of(BYTES)
    attacked = attack_texts(rows, BYTES, Attack(0.2))
    swapped = 0
    for clean, row in zip(rows, attacked.rows, strict=True):
        text, changed = BYTES.decode(clean), BYTES.decode(row)
        assert re.split(r"\S+", text) == re.split(r"\S+", changed)  # white space stays
        pairs = list(zip(text.split(), changed.split(), strict=True))
        assert {new for old, new in pairs if old != new} == {"AAA"}
        swapped += sum(old != new for old, new in pairs)
    assert swapped == attacked.chosen
    assert attacked.candidates == sum(len(BYTES.decode(row).split()) for row in rows)


def test_a_word_without_its_bytes_is_refused() -> None:
    small = Vocabulary.of_bytes([ord(" "), *range(ord("a"), ord("z") + 1)])
    with pytest.raises(RunError, match="puts 'AAA' for words; of this run's bytes that would be white space"):
        attack_texts([small.encode_compact("the quick fox")[0]], small, Attack(0.5))


def test_at_word_level_an_unknown_AAA_is_unk_and_eos_is_no_word() -> None:  # noqa: N802
    rows = rows_of(WORDS)
    attacked = attack_texts(rows, WORDS, Attack(1.0))
    for clean, row in zip(rows, attacked.rows, strict=True):
        assert set(row[clean != WORDS.end_of_line_id].tolist()) == {WORDS.unknown_id}
        assert (row[clean == WORDS.end_of_line_id] == WORDS.end_of_line_id).all()
    known = Vocabulary("word", ["AAA", *WORDS.symbols])  # type: ignore[list-item]
    attacked = attack_texts([known.encode_compact("Some0 Some2")[0]], known, Attack(0.5))
    assert attacked.rows[0].tolist().count(0) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1.5,), "attack rate 1.5: allowed are numbers from 0 to 1"),
        ((-0.1,), "allowed are numbers from 0 to 1"),
        ((float("nan"),), "allowed are numbers from 0 to 1"),
        ((0.1, 0, "A A"), "one word without white space"),
    ],
)
def test_bad_attacks(values: tuple[float], message: str) -> None:
    with pytest.raises(RunError, match=message):
        Attack(*values)


def model_of(router: str = "smoe") -> TransformerXL:
    config = TransformerXLConfig(
        vocab_size=BYTES.size, router=router, num_layers=2, dim=16, num_heads=2, head_dim=8, hidden_dim=8, num_experts=4
    )
    return TransformerXL(config)


TOKENS = BYTES.encode_compact(TEXT)[0]


@pytest.mark.parametrize("budget", [None, 600])
def test_rate_zero_is_the_clean_evaluation(budget: int | None) -> None:
    model, protocol = model_of(), EvalProtocol(4, 32, 32, budget)
    clean = evaluate(model, TOKENS, "byte", split="test", top_k=[1, 4], protocol=protocol)
    attack = Attack(0.0)
    _, attacked = attack_part(TOKENS, BYTES, protocol, attack)
    none = evaluate_attack(model, attacked, "byte", attack, split="test", top_k=[1, 4], protocol=protocol)
    for one, other in zip(clean, none, strict=True):
        assert other["nats"] == pytest.approx(one["nats"], rel=1e-6)
        assert other["tokens"] == one["tokens"]
        assert other["attack"].pop("candidates") > 50
        assert other["attack"] == {"kind": "word", "rate": 0.0, "seed": 0, "word": "AAA", "chosen": 0}


def test_attacked_tokens_count_as_targets() -> None:
    model, protocol = model_of().eval(), EvalProtocol(1, 10_000, 0)
    attack = Attack(0.5)
    _, attacked = attack_part(TOKENS[:300], BYTES, EvalProtocol(1, 299, 0), attack)
    [found] = evaluate_attack(model, attacked, "byte", attack, split="test", top_k=[2], protocol=protocol)
    ids = torch.from_numpy(attacked.rows[0].astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0].double()
    losses = -torch.log_softmax(logits, -1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
    assert found["nats"] == pytest.approx(float(losses.mean()), rel=1e-5)


def test_routing_moves_under_attack_and_not_without() -> None:
    model, protocol = model_of(), EvalProtocol(4, 32, 32)
    with torch.no_grad():
        for parameter in model.parameters():  # at their initial size the context hardly matters
            parameter.mul_(10)
    for rate, moves in ((0.0, False), (0.5, True)):
        clean, attacked = attack_part(TOKENS, BYTES, protocol, Attack(rate))
        change = change_under_attack(model, clean, attacked)
        assert set(change["layers"]) == {"layers.0.moe", "layers.1.moe"}
        for layer in change["layers"].values():
            assert (layer["top1"] > 0) == moves
            kept = [source[:512][(source[:512] >= 0) & (source[:512] < 512)] for source in attacked.sources]
            assert layer["tokens"] == sum(map(len, kept))
    for router in ("dense", "thor"):  # no routing, or one that is drawn anew
        assert change_under_attack(model_of(router), clean, attacked)["layers"] == {}


def test_a_router_of_one_k_is_compared_at_that() -> None:
    model = TransformerXL(replace(model_of().config, router="soft", allow_non_causal=True))
    change = change_under_attack(model, *attack_part(TOKENS[:300], BYTES, EvalProtocol(4, 32, 32), Attack(0.5)))
    assert change["top_k"] == 4
    assert all(layer["sets"] == 0 for layer in change["layers"].values())
