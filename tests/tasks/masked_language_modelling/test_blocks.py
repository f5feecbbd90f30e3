"""Packing, sampling and masking: pure functions of (seed, step, row)."""

import numpy as np
import pytest
import torch

from pointsman._errors import RunError
from pointsman_lab.data.pieces import Pieces
from pointsman_lab.tasks.masked_language_modelling.blocks import (
    MaskedStream,
    Masking,
    PackedText,
    draws,
    mask,
    pack,
    pack_text,
    shares,
    validation_batch,
)
from pointsman_lab.tasks.masked_language_modelling.text import MultilingualText


@pytest.fixture(scope="session")
def packed(text: MultilingualText, pieces: Pieces) -> PackedText:
    return pack_text(text, pieces, 32)


def test_blocks_give_the_sentences_back(text: MultilingualText, pieces: Pieces) -> None:
    blocks, cut = pack(text.train["aa"], pieces, 48)
    assert cut == 0
    assert (blocks[:, 0] == 0).all()
    found = []
    for row in blocks:
        real = row[row >= 0].tolist()[1:]
        while real:
            end = real.index(2)
            found.append(pieces.decode(real[:end]))
            real = real[end + 1 :]
    assert tuple(found) == text.train["aa"]


def test_a_long_sentence_goes_on_in_the_next_block(pieces: Pieces, text: MultilingualText) -> None:
    sentence = " ".join(text.train["aa"][:5])
    blocks, cut = pack([sentence], pieces, 16)
    assert cut == 1
    assert [index for index in blocks.reshape(-1).tolist() if index > 2] == pieces.encode(sentence).tolist()


def test_validation_blocks_are_held_out(packed: PackedText) -> None:
    for language in ("aa", "bb"):
        train, valid = ({row.tobytes() for row in part[language]} for part in (packed.train, packed.valid))
        assert len(packed.valid[language]) >= 64
        assert not train & valid


def test_too_little_text_is_refused(pieces: Pieces, text: MultilingualText) -> None:
    little = MultilingualText("little", {"aa": text.train["aa"][:40]}, {})
    with pytest.raises(RunError, match=r"'aa' has .* blocks"):
        pack_text(little, pieces, 32)
    unseen = MultilingualText("unseen", {"aa": ("\u200b",)}, {"aa": text.train["aa"][:40]})  # no piece
    with pytest.raises(RunError, match=r"unseen: 'aa' has no text in its train part"):
        pack_text(unseen, pieces, 32)


def test_shares_by_hand() -> None:
    assert shares({"a": 1, "b": 3}, 1.0) == pytest.approx({"a": 0.25, "b": 0.75})
    assert shares({"a": 1, "b": 3}, 0.0) == pytest.approx({"a": 0.5, "b": 0.5})
    assert shares({"a": 1, "b": 3}, 0.5)["b"] == pytest.approx(3**0.5 / (1 + 3**0.5))
    with pytest.raises(RunError, match="from 0 to 1"):
        shares({"a": 1}, 1.5)


def test_a_batch_is_a_function_of_its_step(packed: PackedText) -> None:
    forward, jumping = (MaskedStream(packed, 4, seed=3) for _ in range(2))
    batches = [forward.batch(step) for step in range(6)]
    for step in (5, 2, 0, 4):
        assert all(torch.equal(one, other) for one, other in zip(jumping.batch(step), batches[step], strict=True))


def test_each_language_is_read_through_before_it_starts_again(packed: PackedText) -> None:
    stream = MaskedStream(packed, 64, exponent=1.0)
    rows = [row for step in range(30) for row in stream.rows(step)]
    for language, name in enumerate(stream.languages):
        size = len(packed.train[name])
        taken = [block for one, block in rows if one == language]
        assert len(taken) > size
        assert sorted(taken[:size]) == list(range(size))


def test_masks(packed: PackedText, pieces: Pieces) -> None:
    blocks = packed.train["aa"]
    inputs, targets = mask(blocks, pieces, Masking(), draws(0, 2, 7, len(blocks), 1 + 3 * blocks.shape[1]))
    real = (blocks >= 0) & ~pieces.special[np.maximum(blocks, 0)]
    masked = targets >= 0
    assert not (masked & ~real).any()
    assert (targets[masked] == blocks[masked]).all()
    assert (inputs[~masked] == blocks[~masked]).all()
    count = int(masked.sum())
    assert abs(count / real.sum() - 0.15) < 3 * (0.15 * 0.85 / real.sum()) ** 0.5
    by_mask = (inputs == pieces.mask_id)[masked].mean()
    unchanged = (inputs == blocks)[masked].mean()
    assert abs(by_mask - 0.8) < 3 * (0.8 * 0.2 / count) ** 0.5
    assert abs(unchanged - 0.1) < 3 * (0.1 * 0.9 / count) ** 0.5 + 1 / pieces.size
    assert not pieces.special[inputs[masked & (inputs != pieces.mask_id)]].any()


def test_validation_masks_do_not_depend_on_the_batch(packed: PackedText) -> None:
    whole = validation_batch(packed, "bb", range(6))
    parts = [validation_batch(packed, "bb", range(first, first + 2)) for first in (0, 2, 4)]
    for index in (0, 1):
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts]))


def test_impossible_masks_are_refused() -> None:
    with pytest.raises(RunError, match="together"):
        Masking(mask_share=0.8, random_share=0.3)
