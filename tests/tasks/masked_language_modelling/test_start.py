"""XLM-R's pieces and weights: equal to transformers' model, dense and with sparse layers."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

from pointsman._errors import RunError
from pointsman_lab.cli.main import main
from pointsman_lab.data.pieces import MASK, Pieces, open_pieces, train_pieces
from pointsman_lab.models.config import build_model
from pointsman_lab.models.encoder import EncoderConfig
from pointsman_lab.recipes import preset
from pointsman_lab.tasks.masked_language_modelling.start import load_xlm_roberta, start_config
from pointsman_lab.tasks.masked_language_modelling.text import MultilingualText
from pointsman_lab.training.run import load_run

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model_file(text: MultilingualText) -> bytes:
    """A SentencePiece model with the special pieces of XLM-R's: <unk>, <s>, </s> first, no <pad>, no <mask>."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.train["aa"][:400]), model_writer=made, vocab_size=90, model_type="unigram",
        num_threads=1, minloglevel=2,
    )  # fmt: skip
    return made.getvalue()


@pytest.fixture(scope="module")
def folder(model_file: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """XLM-R as transformers saves it, small, with weights far from their initial ones."""
    path = tmp_path_factory.mktemp("xlmr")
    config = transformers.XLMRobertaConfig(
        vocab_size=92, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=42, type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1, bos_token_id=0,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.XLMRobertaForMaskedLM(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    (path / "sentencepiece.bpe.model").write_bytes(model_file)
    return path


def test_pieces_have_fairseqs_ids(model_file: bytes, folder: Path, text: MultilingualText) -> None:
    pieces = open_pieces(folder)
    assert pieces.published
    assert (pieces.size, pieces.mask_id) == (92, 91)
    assert [pieces.symbols[n] for n in (0, 1, 2, 3, 91)] == ["<s>", "<pad>", "</s>", "<unk>", MASK]
    own = sentencepiece.SentencePieceProcessor(model_proto=model_file)
    sentence = text.train["aa"][3] + " Ω"
    ids = own.encode(sentence)
    assert 0 in ids
    assert pieces.encode(sentence).tolist() == [3 if index == 0 else index + 1 for index in ids]  # fairseq's rule
    assert [pieces.symbols[index] for index in pieces.encode(sentence)] == [own.id_to_piece(index) for index in ids]
    found, offsets = pieces.encode_with_offsets(sentence)
    assert np.array_equal(found, pieces.encode(sentence))
    assert "".join(sentence[start:end] for start, end in offsets) == sentence
    assert pieces.decode([0, *pieces.encode(text.train["aa"][3]), 91, 2]) == text.train["aa"][3]
    assert Pieces.from_json(pieces.to_json()).published
    with pytest.raises(RunError, match="nothing: no SentencePiece model that can be read"):
        open_pieces(folder / "nothing")


def loaded(folder: Path, k: int = 1, **changes: Any) -> tuple[Any, Any, int]:
    """Ours and theirs in float64, and how many layers were copied into experts."""
    base = preset("tiny-mlm").with_overrides(
        {"train_top_k": str(k)} | {f"model.{key}": value for key, value in changes.items()}
    )
    config = start_config(base, str(folder), None).model
    assert isinstance(config, EncoderConfig)
    ours = build_model(config).double().eval()
    theirs = transformers.XLMRobertaForMaskedLM.from_pretrained(folder).double().eval()
    return ours, theirs, load_xlm_roberta(ours, theirs.state_dict(), str(folder))


@pytest.mark.parametrize(
    ("changes", "copied"),
    [
        ({"router": "plain", "moe_layers": "after:2"}, 0),
        ({"router": "plain", "moe_layers": "every:2:1", "experts": "ffn", "num_experts": 4}, 0),
        ({"router": "xmoe", "moe_layers": "after:2", "num_experts": 4}, 0),
        ({"router": "smoe", "moe_layers": "every:2", "experts": "ffn", "num_experts": 4, "k": 2}, 2),
    ],
)
def test_the_model_is_xlm_r_dense_and_sparse(folder: Path, changes: dict[str, Any], copied: int) -> None:
    ours, theirs, found = loaded(folder, **changes)
    assert found == copied
    tokens = torch.randint(4, 91, (3, 30), generator=torch.Generator().manual_seed(1))
    tokens[1, 20:] = -1
    mask = tokens >= 0
    with torch.no_grad():
        expected = theirs(torch.where(mask, tokens, 1), attention_mask=mask.long()).logits
        assert float((ours(tokens) - expected)[mask].abs().max()) < 1e-12


def test_a_run_starts_from_the_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "en.txt").write_text("\n".join(f"abc def ghi {n % 7} jkl" for n in range(600)))
    spec = f"multilingual:{text}"
    arguments = ["train", "--from", str(folder), "--preset", "tiny-mlm", "--router", "xmoe", "--data", spec,
                 "--steps", "1", "--set", "batch_size=2", "--set", "accumulation=1", "--set", "segment_length=24",
                 "--set", "model.num_experts=4", "--set", "model.moe_layers=after:2",
                 "--set", "learning_rate=1e-30", "--set", "eval_tokens=100", "--set", "valid_tokens=100",
                 "--top-k", "1", "--out", str(tmp_path / "run")]  # fmt: skip
    assert main(arguments) == 0
    assert "starts from the weights of" in capsys.readouterr().err
    saved = load_run(tmp_path / "run")
    assert saved.vocabulary == open_pieces(folder)
    theirs = transformers.XLMRobertaForMaskedLM.from_pretrained(folder).roberta.embeddings.word_embeddings.weight
    assert torch.equal(saved.model.embedding.weight, theirs)


def test_what_does_not_fit_is_refused(folder: Path, text: MultilingualText, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"model.experts=base has no layers.0.feed_forward_norm"):
        loaded(folder, router="smoe", moe_layers="every:2", num_experts=4)
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(RunError, match="'bert' is no model that an encoder can be"):
        start_config(preset("xmoe-base"), str(tmp_path), None)
    assert not train_pieces(text.train["aa"][:300], 90).published
