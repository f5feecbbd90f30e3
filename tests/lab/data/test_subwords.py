"""Subwords: lossless, the same ids as the library that defines them, and every vocabulary as a tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from pointsman._errors import RunError
from pointsman_lab.data.corpus import load_corpus
from pointsman_lab.data.subwords import (
    Subwords,
    as_tokenizer,
    learn_pieces,
    open_tokenizer,
    piece_model,
    read_vocabulary,
    save_tokenizer,
)
from pointsman_lab.data.vocabulary import Vocabulary

WORDS = [a + b + c for a in ("ro", "gate", "ex", "to") for b in ("ut", "per", "k", "soft") for c in ("ing", "er", "s")]
TEXT = "".join(f"def {one}(hidden):\n    return {two}  # naïve – 例\n\n" for one in WORDS for two in WORDS[::7])
OTHER = "\tUnseen: ☃ and   spaces\r\n"


@pytest.fixture(scope="module")
def pieces() -> Subwords:
    return learn_pieces(TEXT.splitlines(keepends=True), 300)


def bpe() -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"],
                                  show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def test_pieces_are_lossless_and_those_of_sentencepiece(pieces: Subwords) -> None:
    assert pieces.size == 300
    for text in (TEXT, OTHER, "", " ", "x"):
        ids, unknown = pieces.encode_compact(text)
        assert pieces.decode(ids) == text
        assert unknown == 0
    assert len(pieces.encode(TEXT)) < 0.8 * len(TEXT)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(piece_model(TEXT.splitlines(keepends=True), 300))
    for line in TEXT.splitlines(keepends=True)[:20]:
        assert pieces.encode(line).tolist() == processor.encode(line, out_type=int)
    again = read_vocabulary(pieces.to_json())
    assert again == pieces
    assert again.digest == pieces.digest


def test_a_folder_s_tokenizer_gives_its_ids_and_is_written_again(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder, copy = tmp_path / "model", tmp_path / "copy"
    PreTrainedTokenizerFast(tokenizer_object=bpe(), eos_token="<end>").save_pretrained(folder)
    opened = open_tokenizer(str(folder))
    assert opened is not None
    theirs = AutoTokenizer.from_pretrained(folder)
    assert opened.encode(TEXT + OTHER).tolist() == theirs(TEXT + OTHER)["input_ids"]
    assert opened.decode(opened.encode(OTHER)) == OTHER
    assert opened.end_id == theirs.eos_token_id
    copy.mkdir()
    save_tokenizer(read_vocabulary(opened.to_json()), copy)
    assert AutoTokenizer.from_pretrained(copy)(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    bare = open_tokenizer(str(folder / "tokenizer.json"))
    assert bare is not None
    assert bare.end_id is None


def test_a_file_s_truncation_and_padding_lose_no_text() -> None:
    tokenizer = bpe()
    whole = tokenizer.encode(TEXT).ids
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=64)
    opened = Subwords(tokenizer.to_str())
    assert opened.definition == tokenizer.to_str()  # digests of saved runs depend on it
    assert opened.encode(TEXT).tolist() == whole
    assert len(opened.encode("x")) == 1


def test_a_snapshot_of_links_is_opened(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text(bpe().to_str())
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/tokenizer.json").symlink_to("../blob")
    for name in ("snapshot", "snapshot/tokenizer.json"):
        opened = open_tokenizer(str(tmp_path / name))
        assert opened is not None
        assert opened.size == 300


@pytest.mark.parametrize(
    "files",
    [{"/tmp/x": ""}, {"../../x": ""}, {"tokenizer.json": ""}, {".bashrc": ""}, {"": ""}, {"chat_template.jinja": 1},
     {"tokenizer_config.json": {}}, ["chat_template.jinja"], "x"],
)  # fmt: skip
def test_a_vocabulary_names_no_file_but_a_tokenizer_s(files: object, pieces: Subwords) -> None:
    content = json.dumps({**json.loads(pieces.to_json()), "files": files})
    with pytest.raises(RunError, match="not a vocabulary: ") as caught:
        read_vocabulary(content)
    assert "\n" not in str(caught.value)
    with pytest.raises(RunError):
        Subwords(pieces.definition, {"../x": ""})


@pytest.mark.parametrize("level", ["byte", "word"])
def test_every_vocabulary_is_a_tokenizer(level: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    if level == "byte":
        vocabulary = Vocabulary.of_bytes(TEXT.encode())
    else:
        vocabulary = Vocabulary("word", ["<unk>", "<eos>", *sorted(set(TEXT.split()))])
    text = TEXT + "unseen ☃"
    seen = TEXT if level == "byte" else text
    assert as_tokenizer(vocabulary).encode(seen).ids == vocabulary.encode(seen).tolist()
    save_tokenizer(vocabulary, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(seen)["input_ids"] == vocabulary.encode(seen).tolist()
    if level != "word":  # words come back with single spaces
        assert theirs.decode(vocabulary.encode(TEXT)) == TEXT


def test_a_corpus_in_subwords_is_the_text(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT * 3, encoding="utf-8")
    corpus = load_corpus(str(file), cache_dir=tmp_path / "cache", tokenizer="pieces:300")
    assert corpus.vocabulary.level == "subword"
    assert "subwords" in corpus.description
    whole = b"".join(corpus.vocabulary.decode_bytes(corpus.split(part)) for part in corpus.splits)
    assert whole.decode() == TEXT * 3
    again = load_corpus(str(file), cache_dir=tmp_path / "cache", tokenizer="pieces:300")
    assert again.fingerprint == corpus.fingerprint
    np.testing.assert_array_equal(again.split("train"), corpus.split("train"))
    evaluated = load_corpus(str(file), cache_dir=tmp_path / "cache", vocabulary=corpus.vocabulary)
    np.testing.assert_array_equal(evaluated.split("test"), corpus.split("test"))


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "bad.json").write_text(json.dumps({"model": 1}))
    (tmp_path / "bad.model").write_bytes(b"nothing")
    (tmp_path / "latin.json").write_bytes(b"caf\xe9")
    with (tmp_path / "bpe.model").open("wb") as merges:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.splitlines()), model_writer=merges, vocab_size=60, model_type="bpe",
            minloglevel=2,
        )  # fmt: skip
    with (tmp_path / "usual.model").open("wb") as usual:  # with SentencePiece's own normalization and first space
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.splitlines()), model_writer=usual, vocab_size=50, minloglevel=2
        )
    for name, says in (
        (str(tmp_path / "usual.model"), r"usual\.model: it changes text first"),
        ("pieces:12", "whole number from 300"),
        ("pieces:x", "whole number from 300"),
        ("nowhere", "no file and no folder"),
        (str(tmp_path), "holds no tokenizer"),
        (str(tmp_path / "bad.json"), "not a tokenizer"),
        (str(tmp_path / "bad.model"), "not a SentencePiece model"),
        (str(tmp_path / "latin.json"), r"latin\.json: not UTF-8 \(byte at 3\)"),
        (str(tmp_path / "bpe.model"), r"bpe\.model: a BPE model; allowed are unigram models"),
        ("pieces:100000", "cannot be trained on this text"),
    ):
        with pytest.raises(RunError, match=says):
            load_corpus(str(tmp_path / "text.txt"), cache_dir=tmp_path / "cache", tokenizer=name)
    with pytest.raises(RunError, match="asks for level=word"):
        load_corpus(f"{tmp_path / 'text.txt'}:level=word", cache_dir=tmp_path / "cache", tokenizer="pieces:300")
