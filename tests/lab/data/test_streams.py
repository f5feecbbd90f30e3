from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pointsman._errors import RunError
from pointsman_lab.data.streams import IGNORE, BatchStream, EvalStream


def test_columns_are_contiguous_and_rows_go_on() -> None:
    stream = BatchStream(np.arange(26, dtype=np.uint8), batch_size=2, segment_length=5)
    assert stream.steps_per_epoch == 2
    inputs, targets = stream.batch(0)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [12, 13, 14, 15, 16]]
    assert targets.tolist() == [[1, 2, 3, 4, 5], [13, 14, 15, 16, 17]]
    assert stream.batch(1)[0].tolist() == [[5, 6, 7, 8, 9], [17, 18, 19, 20, 21]]


@given(batch_size=st.integers(1, 5), segment=st.integers(1, 7), extra=st.integers(0, 60), step=st.integers(0, 100))
def test_training_segments(batch_size: int, segment: int, extra: int, step: int) -> None:
    tokens = np.arange(batch_size * segment + 1 + extra, dtype=np.uint16)
    stream = BatchStream(tokens, batch_size, segment)
    inputs, targets = stream.batch(step)
    assert inputs.shape == targets.shape == (batch_size, segment)
    assert torch.equal(targets, inputs + 1)
    assert stream.is_epoch_start(step) == (step % stream.steps_per_epoch == 0)
    following = stream.batch(step + 1)[0]
    if stream.is_epoch_start(step + 1):
        assert torch.equal(following, stream.batch(0)[0])
    else:
        assert torch.equal(following, inputs + segment)
    seen = torch.cat([stream.batch(index)[1].flatten() for index in range(stream.steps_per_epoch)])
    assert len(set(seen.tolist())) == len(seen)
    assert len(tokens) - 1 - len(seen) < batch_size * (segment + 1)


def test_batches_do_not_share_memory_with_the_tokens() -> None:
    tokens = np.arange(30, dtype=np.int64)
    inputs, targets = BatchStream(tokens, 2, 4).batch(0)
    inputs.zero_()
    assert targets[0, 0] == 1
    assert tokens[1] == 1


def test_a_text_too_short_to_train_on_names_lengths() -> None:
    BatchStream(np.zeros(33, dtype=np.uint8), 4, 8)
    with pytest.raises(RunError, match="has 32 tokens, and one step of 4 x 8 needs 33"):
        BatchStream(np.zeros(32, dtype=np.uint8), 4, 8)


@given(tokens=st.integers(2, 200), batch_size=st.integers(1, 6), segment=st.integers(1, 9))
def test_every_token_is_evaluated_once(tokens: int, batch_size: int, segment: int) -> None:
    if tokens <= segment:
        with pytest.raises(RunError, match=f"has {tokens} tokens, and one segment needs {segment + 1}"):
            EvalStream(np.arange(tokens), batch_size, segment)
        return
    stream = EvalStream(np.arange(tokens), batch_size, segment)
    seen: Counter[int] = Counter()
    last: torch.Tensor | None = None
    batches = list(stream)
    assert len(batches) == len(stream)
    for index, (inputs, targets) in enumerate(batches):
        assert inputs.shape == targets.shape
        assert inputs.shape[0] == stream.rows <= batch_size
        assert inputs.shape[1] == segment or (index == len(stream) - 1 and inputs.shape[1] < segment)
        there = targets != IGNORE
        assert torch.equal(targets[there], inputs[there] + 1)
        assert there[:, :-1].all()
        assert stream.is_whole(index) == bool(there.all())
        seen.update(targets[there].tolist())
        if last is not None:
            assert torch.equal(inputs[:, 0], last + 1)
        last = inputs[:, -1]
    assert seen == Counter(range(1, tokens))
    assert stream.num_tokens == tokens - 1


@given(tokens=st.integers(10, 400), batch_size=st.integers(1, 6), segment=st.integers(1, 9), budget=st.integers(1, 500))
def test_a_budget_takes_evenly_spaced_stretches_of_whole_segments(
    tokens: int, batch_size: int, segment: int, budget: int
) -> None:
    stream = EvalStream(np.arange(tokens), batch_size, segment, budget=budget)
    targets = torch.cat([targets for _, targets in stream], dim=1)
    count = int((targets != IGNORE).sum())
    assert count == stream.num_tokens
    if budget >= tokens - 1:
        assert count == tokens - 1
        assert f"all {tokens - 1} targets" in stream.protocol
        return
    assert (targets != IGNORE).all()
    assert targets.shape[1] % segment == 0
    assert count <= max(budget, stream.rows * segment)
    assert count > budget - stream.rows * segment
    assert len(set(targets.flatten().tolist())) == count
    gaps = (targets[1:, 0] - targets[:-1, 0]).tolist()
    assert all(abs(gap - (tokens - 1) / stream.rows) < 1 for gap in gaps)


def test_budget_protocol_is_stated() -> None:
    stream = EvalStream(np.zeros(10_001, dtype=np.uint8), 10, 32, budget=2_000)
    assert stream.protocol == "1,920 of 10,000 targets: 10 evenly spaced stretches of 192, segments of 32"
    assert EvalStream(np.zeros(101, dtype=np.uint8), 10, 32).protocol == "all 100 targets in 3 rows, segments of 32"


def test_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="batch size 0"):
        BatchStream(np.zeros(9, dtype=np.uint8), 0, 4)
    with pytest.raises(ValueError, match="segment length 0"):
        EvalStream(np.zeros(9, dtype=np.uint8), 1, 0)
    with pytest.raises(RunError, match="0 tokens to evaluate"):
        EvalStream(np.zeros(9, dtype=np.uint8), 1, 4, budget=0)
    with pytest.raises(ValueError, match="step is -1"):
        BatchStream(np.zeros(9, dtype=np.uint8), 1, 4).batch(-1)
    with pytest.raises(IndexError):
        EvalStream(np.zeros(9, dtype=np.uint8), 1, 4).batch(2)
