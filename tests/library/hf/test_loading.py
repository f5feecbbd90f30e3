"""Damaged folders of Hugging Face models are refused by name."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pointsman._errors import RunError
from pointsman.hf.loading import load_model, load_tokenizer
from tests.library.hf import zoo


def test_a_tokenizer_setting_of_a_wrong_type_is_refused_with_the_folder(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("a")["input_ids"] == [1]
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": "long"}))
    with pytest.raises(RunError, match=f"^{tmp_path}: no tokenizer that transformers can load"):
        load_tokenizer(str(tmp_path))


def test_encoder_decoders_are_loaded(tmp_path: Path) -> None:
    zoo.tiny_model("switch_transformers").save_pretrained(tmp_path)
    assert type(load_model(str(tmp_path))).__name__ == "SwitchTransformersForConditionalGeneration"
