"""Generation: what is drawn, what the cache forgets, and text that appears as it is complete."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pointsman._errors import RunError
from pointsman_lab.cli.main import main
from pointsman_lab.data.vocabulary import Vocabulary
from pointsman_lab.models.decoder import Decoder, DecoderConfig
from pointsman_lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from pointsman_lab.tasks.language_modelling.generation import (
    Sampling,
    check_prompts,
    generate,
    text_of,
)
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.run import Run

SHAPE = {"num_layers": 1, "dim": 16, "num_heads": 2, "head_dim": 8, "hidden_dim": 8, "num_experts": 4}


def drawn(model: torch.nn.Module, prompts: list[list[int]], **how: object) -> torch.Tensor:
    settings = {"tokens": 12, "context": 8, "sampling": Sampling(temperature=0), **how}
    steps = generate(model, [np.array(one) for one in prompts], **settings)  # type: ignore[arg-type]
    return torch.stack(list(steps), 1)


@pytest.mark.parametrize("family", ["decoder", "transformer-xl"])
def test_beyond_the_context_one_layer_sees_the_end_of_the_text_alone(family: str) -> None:
    if family == "decoder":
        model: torch.nn.Module = Decoder(DecoderConfig(vocab_size=20, init_std=0.5, **SHAPE)).eval()  # type: ignore[arg-type]
    else:
        model = TransformerXL(TransformerXLConfig(vocab_size=20, init_std=0.5, **SHAPE)).eval()  # type: ignore[arg-type]
    text = [1, 2, 3, *drawn(model, [[1, 2, 3]])[0].tolist()]
    for stop in range(4, len(text)):
        with torch.no_grad():
            logits = model(torch.tensor([text[max(0, stop - 8) : stop]])).logits[0, -1]
        assert int(logits.argmax()) == text[stop]


def test_a_seed_draws_the_same_and_top_p_cuts_the_rest() -> None:
    model = Decoder(DecoderConfig(vocab_size=20, init_std=0.5, **SHAPE)).eval()  # type: ignore[arg-type]
    prompts = [[1, 2, 3], [4]]
    first = drawn(model, prompts, sampling=Sampling(seed=1))
    assert torch.equal(first, drawn(model, prompts, sampling=Sampling(seed=1)))
    assert not torch.equal(first, drawn(model, prompts, sampling=Sampling(seed=2)))
    assert torch.equal(drawn(model, prompts), drawn(model, prompts, sampling=Sampling(top_p=1e-6)))
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(200, 1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(200)]
    assert set(Sampling(top_p=0.8).draw(logits, generators).tolist()) == {0, 1}
    assert set(Sampling().draw(logits, generators).tolist()) == {0, 1, 2}
    for temperature in (1e-39, 1e-30):
        assert set(Sampling(temperature).draw(100 * logits, generators).tolist()) == {int(logits[0].argmax())}


@pytest.mark.parametrize("router", ["smoe", "soft"])
def test_the_command_draws_words_of_the_vocabulary_at_any_k(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], router: str
) -> None:
    shape = DecoderConfig(vocab_size=4000, router=router, allow_non_causal=True, init_std=0.5, **SHAPE)  # type: ignore[arg-type]
    config, words = RunConfig(model=shape, precision="float32"), Vocabulary("word", ["<unk>", "a", "b"])
    loaded = Run(Path("run"), config, 1, Decoder(shape).eval(), words)
    monkeypatch.setattr("pointsman_lab.tasks.language_modelling.generation.load_run", lambda *_, **__: loaded)
    assert main(["generate", "run", "--prompt", "a b", "--tokens", "9", "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.split()) == 11
    assert bool(drawn(loaded.model, [[1]]).max() > 2)


def test_text_appears_when_its_character_is_complete() -> None:
    text = "naïve ☃ text " * 20
    vocabulary = Vocabulary.of_bytes(text.encode())
    shown = list(text_of(vocabulary, [], map(int, vocabulary.encode(text))))
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)
    assert shown[2:4] == ["", "ï"]
    words = Vocabulary("word", ["<unk>", "<eos>", "a", "b"])
    assert list(text_of(words, [2, 3], [2, 1, 3])) == [" a", "\n", "b", ""]
    assert list(text_of(vocabulary, [], [int(vocabulary.encode("☃")[0])])) == ["", "\ufffd"]


def test_mistakes_are_one_line() -> None:
    with pytest.raises(RunError, match="there is no prompt"):
        check_prompts([], 4)
    with pytest.raises(RunError, match="prompt 2 has 5 tokens, and the model's context is 4"):
        check_prompts([np.zeros(4), np.zeros(5)], 4)
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(RunError, match="allowed are numbers"):
            Sampling(**wrong)  # type: ignore[arg-type]
