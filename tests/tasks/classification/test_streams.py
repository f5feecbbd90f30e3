"""Batches of labelled texts: cut, padded, bucketed, and a pure function of (seed, step)."""

import numpy as np
import pytest
import torch

from pointsman._errors import RunError
from pointsman_lab.data.task_streams import TaskStream, eval_batches
from pointsman_lab.data.vocabulary import Vocabulary
from pointsman_lab.tasks.classification.data import Examples
from pointsman_lab.tasks.classification.task import encode_examples

BYTES = Vocabulary.of_bytes(b"abcdefghijklmnopqrstuvwxyz \n")
TEXTS = tuple("x" * (1 + 7 * i % 60) for i in range(333))
EXAMPLES = Examples(TEXTS, tuple(i % 3 for i in range(333)))


def test_long_texts_are_cut_and_counted_and_keep_their_end_mark() -> None:
    encoded = encode_examples(Examples(("abc", "abcd", "abcdefgh"), (0, 1, 0)), BYTES, 5)
    assert [BYTES.decode(row) for row in encoded.rows] == ["abc\n", "abcd\n", "abcd\n"]
    assert encoded.truncated == 1
    assert encoded.labels.tolist() == [0, 1, 0]
    with pytest.raises(RunError, match="at least 2"):
        encode_examples(EXAMPLES, BYTES, 1)


def test_at_word_level_the_mark_is_eos() -> None:
    words = Vocabulary("word", ["a", "b", "<eos>", "<unk>"])
    encoded = encode_examples(Examples(("a b zzz",), (0,)), words, 10)
    assert encoded.rows[0].tolist() == [0, 1, 3, 2]
    assert encoded.unknown == 1


@pytest.mark.parametrize(
    ("vocabulary", "mark"),
    [
        (Vocabulary("word", ["a", "b", "<unk>"]), "<unk>"),
        (Vocabulary.of_bytes(b"ab "), " "),
        (Vocabulary.of_bytes(b"ab?"), "?"),
    ],
)
def test_the_mark_without_a_newline_is_a_space_or_unknown(vocabulary: Vocabulary, mark: str) -> None:
    row = encode_examples(Examples(("a",), (0,)), vocabulary, 10).rows[0]
    assert vocabulary.decode(row[:1]) == "a"
    assert vocabulary.decode(row[1:]) == mark


def test_every_example_comes_in_every_epoch_and_batches_are_full() -> None:
    stream = TaskStream(encode_examples(EXAMPLES, BYTES, 100), 16, seed=3)
    assert stream.steps_per_epoch == 21
    for epoch in range(2):
        places = [stream.places(21 * epoch + step) for step in range(21)]
        assert {len(batch) for batch in places} == {16}
        assert set(np.concatenate(places).tolist()) == set(range(333))
        assert len(np.concatenate(places)) == 21 * 16
    assert stream.is_epoch_start(21)
    assert not stream.is_epoch_start(22)


def test_batches_follow_from_seed_and_step_alone() -> None:
    encoded = encode_examples(EXAMPLES, BYTES, 100)
    one, other, third = (TaskStream(encoded, 16, seed=seed) for seed in (3, 3, 4))
    _ = [one.batch(step) for step in range(30)]
    for step in (30, 2, 17):
        assert all(torch.equal(a, b) for a, b in zip(one.batch(step), other.batch(step), strict=True))
    assert any(not np.array_equal(one.places(step), third.places(step)) for step in range(5))


def test_buckets_save_most_of_the_padding() -> None:
    stream = TaskStream(encode_examples(EXAMPLES, BYTES, 100), 8, seed=0)
    padded = sum(int((stream.batch(step)[0] < 0).sum()) for step in range(stream.steps_per_epoch))
    whole = sum(stream.batch(step)[0].numel() for step in range(stream.steps_per_epoch))
    assert padded / whole < 0.1  # without buckets it is above 0.4
    assert stream.tokens_per_step == pytest.approx(8 * np.mean([len(text) + 1 for text in TEXTS]))


def test_evaluation_reads_every_example_once() -> None:
    encoded = encode_examples(EXAMPLES, BYTES, 100)
    batches = list(eval_batches(encoded, 50))
    assert sorted(place for batch in batches for place in batch.places) == list(range(333))
    assert sum(batch.num_tokens for batch in batches) == sum(int((batch.tokens >= 0).sum()) for batch in batches)
    for batch in batches:
        assert batch.labels.tolist() == [EXAMPLES.labels[place] for place in batch.places]
        assert [BYTES.decode(row[row >= 0].numpy()) for row in batch.tokens] == [TEXTS[p] + "\n" for p in batch.places]
    assert len(encoded.take(np.arange(7))) == 7
