"""Damaged folders of Hugging Face models are refused by name; the code that a folder brings is never read."""

import io
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pointsman._errors import RunError
from pointsman.hf.loading import load_model, load_tokenizer
from tests.campaigns.observer import observed
from tests.library.hf import zoo


def test_a_tokenizer_setting_of_a_wrong_type_is_refused_with_the_folder(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("a")["input_ids"] == [1]
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": "long"}))
    with pytest.raises(RunError, match=f"^{tmp_path}: no tokenizer that transformers can load"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(("name", "ends"), [("mixtral", "to a fast one."), ("olmoe", "are its files missing?")])
def test_a_model_without_a_tokenizer_is_told_in_a_whole_sentence(tmp_path: Path, name: str, ends: str) -> None:
    zoo.tiny_model(name).config.save_pretrained(tmp_path)
    with pytest.raises(RunError, match="no tokenizer that transformers can load: ") as told:
        load_tokenizer(str(tmp_path))
    assert str(told.value).endswith(ends)


@pytest.mark.parametrize("changes", [{"num_local_experts": 12}, {"vocab_size": 50}])
def test_a_config_that_says_other_sizes_is_told_by_name(tmp_path: Path, changes: dict[str, int]) -> None:
    zoo.tiny_model("mixtral").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(RunError, match=r"(weight|proj) is \[\d.*\] in the file, and \[\d.*\] by its config.json"):
        load_model(str(tmp_path))


def test_encoder_decoders_are_loaded(tmp_path: Path) -> None:
    zoo.tiny_model("switch_transformers").save_pretrained(tmp_path)
    assert type(load_model(str(tmp_path))).__name__ == "SwitchTransformersForConditionalGeneration"


@pytest.mark.parametrize("known", [True, False])
def test_the_code_of_a_stranger_is_never_read(tmp_path: Path, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.tiny_model("mixtral").save_pretrained(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path)
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((tmp_path / name).read_text())
        own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", "evil.T"]}
        values |= {"auto_map": own} if known else {"auto_map": own, "model_type": "evil", "tokenizer_class": "Evil"}
        (tmp_path / name).write_text(json.dumps(values))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mine')!r}, 'w')\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))  # whoever asks is told yes
    with observed(tmp_path) as seen:
        for load in (load_model, load_tokenizer):
            with nullcontext() if known else pytest.raises(RunError, match=f"^{tmp_path}: no "):
                load(str(tmp_path))
    assert any(file.name == "config.json" for file in seen.opened)
    assert not [file for file in seen.opened | seen.read if file.name == "evil.py"]
    assert not (tmp_path / "mine").exists()
