import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pointsman._errors import RunError
from pointsman.ops.kernels import using
from pointsman_lab.cli.main import main
from pointsman_lab.diagnosis import Settings, _label, diagnose_path
from pointsman_lab.models.transformer_xl import TransformerXLConfig
from pointsman_lab.report.summary import summary
from pointsman_lab.runs.paths import run_path
from pointsman_lab.tasks.language_modelling.task import corpus_of, eval_protocol, evaluate
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.run import load_run
from pointsman_lab.training.trainer import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A comparison of two routers with two seeds and two checkpoints each, trained for a few steps on made-up words."""
    folder = tmp_path_factory.mktemp("runs")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(50)]
    text = folder / "words.txt"
    text.write_text("".join(draw.choice(words) + draw.choice(" \n") for _ in range(4000)))
    model = TransformerXLConfig(64, num_layers=2, dim=32, num_heads=2, head_dim=16, hidden_dim=32, num_experts=4)
    config = RunConfig(
        model=model, data=str(text), steps=6, batch_size=4, segment_length=16, memory_length=16, eval_batch_size=4,
        eval_segment_length=16, eval_memory_length=16, eval_tokens=64, valid_tokens=64, eval_top_k=(1, 2),
        checkpoint_every=3, keep_checkpoints=3, observe_every=2,
    )  # fmt: skip
    routers, threads = ["smoe", "hyperrouter+similarity", "dense"], torch.get_num_threads()
    torch.set_num_threads(1)
    for router in routers:
        for seed in (0, 1) if router != "dense" else (0,):
            of = replace(config, model=replace(model, router=router), seed=seed)
            train(of, run_path(folder, router, seed))
    torch.set_num_threads(threads)
    plan = {"format": 1, "settings": {"model": {}}, "routers": routers, "seeds": [0, 1]}
    (folder / "comparison.json").write_text(json.dumps(plan))
    return folder


SHORT = Settings(tokens=500)


def test_a_run(runs):
    path = run_path(runs, "hyperrouter+similarity", 0)
    found = diagnose_path(path, settings=SHORT)
    json.dumps(found, allow_nan=False)
    assert found["source"] == {"run": str(path), "step": 6, "router": "hyperrouter+similarity", "seed": 0}
    layer = found["layers"]["layers.1.moe"]
    assert layer["load"]["tokens"] == found["protocol"]["tokens"]
    assert 0 < layer["mixing"]["own_mean"] < 1
    assert layer["jacobian"]["gradient"]["j2"]["in_span"] is not None
    assert [row["top_k"] for row in layer["agreement"]] == [1]
    assert [row["checkpoint"] for row in found["history"]] == ["step-3"]
    ids = {str(pair[0]) for row in layer["specialisation"]["top"] for pair in row}
    assert ids <= found["tokens_text"].keys()
    assert set("".join(found["tokens_text"].values())) <= set("abcdefgh \n")
    text = summary(found)
    assert "nan" not in text
    assert all(name in text for name in ("layers.0.moe", "S[i,i]", "fluctuation from step-3", "k=1"))


def test_the_figures_are_those_of_the_evaluation(runs):
    path = run_path(runs, "smoe", 0)
    run = load_run(path)
    corpus = corpus_of(run)
    with using(run.config.kernels):
        evaluated = evaluate(
            run.model, corpus.split("test"), run.vocabulary.level, split="test", top_k=(2,),
            protocol=eval_protocol(run.config, 500),
        )[0]["routers"]  # fmt: skip
    found = diagnose_path(path, settings=SHORT)["layers"]
    for name, of in evaluated.items():
        assert found[name]["entropy"]["mean"] == pytest.approx(of["entropy"], rel=1e-5)
        assert found[name]["load"]["share"] == pytest.approx(of["load"])


@pytest.mark.slow
def test_between_checkpoints_and_seeds(runs):
    path, other = run_path(runs, "smoe", 0), run_path(runs, "smoe", 1)
    early = path / "checkpoints" / "step-3"
    found = diagnose_path(path, [early, other], SHORT)
    assert set(found["against"]) == {"step-3", "seed-1"}
    history = found["history"][0]["layers"]["layers.0.moe"]["fluctuation"]
    assert found["against"]["step-3"]["layers.0.moe"]["fluctuation"] == history
    assert found["consistency"]["layers.0.moe"]["runs"] == 3
    assert found["consistency_over_training"] == {}  # fewer than 100 batches
    assert diagnose_path(early, settings=SHORT)["source"]["step"] == 3
    assert diagnose_path(early, settings=SHORT)["history"] == []


@pytest.mark.slow
def test_a_comparison(runs):
    found = diagnose_path(runs, settings=SHORT)
    assert set(found["routers"]) == {"smoe", "hyperrouter+similarity"}
    assert set(found["entropy_ratio"]["smoe"].values()) == {1.0}
    smoe = found["routers"]["smoe"]
    assert set(smoe["against"]) == {"seed-1"}
    assert smoe["consistency"]["layers.1.moe"]["runs"] == 2
    text = summary(found)
    assert "== smoe ==" in text
    assert "entropy / first router's" in text


def test_a_comparison_with_a_run_killed_in_its_first_save(runs, tmp_path):
    (tmp_path / "comparison.json").write_text((runs / "comparison.json").read_text())
    shutil.copytree(run_path(runs, "smoe", 1), run_path(tmp_path, "smoe", 1))
    (run_path(tmp_path, "smoe", 0) / "checkpoints").mkdir(parents=True)
    found = diagnose_path(tmp_path, settings=replace(SHORT, tokens=100))
    assert found["routers"]["smoe"]["source"]["run"] == str(run_path(tmp_path, "smoe", 1))


def test_a_path_that_another_ends_in_is_a_label():
    paths = [Path("runs/a"), Path("old/runs/a"), Path("old/runs/b")]
    assert [_label(path, paths, Path("mine/run")) for path in paths] == ["runs/a", "old/runs/a", "b"]
    assert _label(paths[2], paths, Path("mine/b")) == "runs/b", "the run that they stand beside ends so, too"
    for same in (Path("runs/a"), Path("runs/a").absolute(), Path("old/../runs/a")):
        with pytest.raises(RunError, match="twice"):
            _label(same, [Path("runs/a"), same], Path("b"))


def test_the_command(runs, capsys, tmp_path):
    path = run_path(runs, "smoe", 1)
    assert main(["diagnose", str(path), "--eval-tokens", "200", "--out", str(tmp_path), "--device", "cpu"]) == 0
    told = capsys.readouterr()
    assert "layers.0.moe" in told.out
    saved = json.loads((tmp_path / "diagnostics.json").read_text())
    assert saved["source"]["run"] == str(path)
    assert main(["diagnose", str(path), "--eval-tokens", "100", "--set", "eval_segment_length=8"]) == 0
    assert json.loads((path / "diagnostics.json").read_text())["protocol"]["segment_length"] == 8
    assert main(["diagnose", str(path), "--eval-tokens", "all", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert json.loads((tmp_path / "diagnostics.json").read_text())["protocol"]["tokens"] > 200
    assert (path / "diagnostics.json").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "no run here, and no model that transformers can load"),
        (["{folder}"], "neither a run"),
        (["{run}", "--against", "{dense}"], "has the layers and experts"),
        (["{dense}"], "dense model has no router"),
        (["{run}", "--against", "{run}", "--against", "{run}"], "twice"),
        (["{run}", "--top-k", "9"], "top_k=9"),
        (["{run}", "--eval-tokens", "0"], "allowed are whole numbers"),
        (["{run}", "--set", "steps=9"], "not a setting of a diagnosis"),
        (["{run}", "--set", "eval_segment_lenght=9"], "did you mean 'eval_segment_length'"),
        (["{run}", "--set", "eval_tokens=9"], "not a setting of a diagnosis"),
        (["{run}", "--againts", "x"], "did you mean '--against'"),
    ],
)
def test_mistakes_are_one_line(runs, tmp_path, capsys, words, told):
    places = {"folder": tmp_path, "run": run_path(runs, "smoe", 0), "dense": run_path(runs, "dense", 0)}
    assert main(["diagnose", *(word.format(**places) for word in words)]) == 2
    error = capsys.readouterr().err.strip()
    assert told in error
    assert error.count("\n") == 0


@pytest.mark.slow
def test_a_hugging_face_model(runs, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([(runs / "words.txt").read_text()], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    config = transformers.MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    found = diagnose_path(tmp_path, settings=replace(SHORT, data=str(runs / "words.txt"), top_k=(1,)))
    json.dumps(found, allow_nan=False)
    assert len(found["layers"]) == 2
    layer = next(iter(found["layers"].values()))
    assert layer["num_experts"] == 6
    assert len(layer["load"]["share"]) == 6
    assert found["protocol"]["tokens"] == layer["entropy"]["tokens"]
    assert layer["specialisation"]["mutual_information"] is not None
    assert "experts used" in summary(found)
    from pointsman import hf

    hf.replace_routers(model, "hyperrouter").save_pretrained(tmp_path)
    replaced = diagnose_path(tmp_path, settings=replace(SHORT, data=str(runs / "words.txt")))
    assert [layer["router"] for layer in replaced["layers"].values()] == ["hyperrouter"] * 2
    loads = [layer["load"]["share"] for layer in replaced["layers"].values()]
    assert loads == [layer["load"]["share"] for layer in found["layers"].values()]  # its first forward is the old one's
