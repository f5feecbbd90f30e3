"""The lab's runs over ranks: the figures of one process, and checkpoints that any number of ranks goes on from."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pointsman._errors import RunError
from pointsman.ranks import ALONE, Ranks
from pointsman_lab.evaluation.passes import own_share
from pointsman_lab.runs.checkpoints import open_checkpoint
from pointsman_lab.tasks.language_modelling.task import LanguageModelling
from pointsman_lab.training.checkpoint import checkpoint_tensors
from pointsman_lab.training.directory import RunDirectory
from pointsman_lab.training.objectives import Objective, with_a_target
from pointsman_lab.training.run import load_run
from pointsman_lab.training.state import TrainingState
from tests.lab.parallel.ranks import on_ranks
from tests.lab.parallel.worker import masked, pictured, run_config, training, translated

TIMES = ("step_seconds", "tokens_per_second", "overhead")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(50)]
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("".join(draw.choice(words) + draw.choice(" \n") for _ in range(3000)))
    return str(file)


def content(out: Path) -> Any:
    """Metrics without times, and the results of the evaluation."""
    rows = [{key: value for key, value in row.items() if key not in TIMES} for row in RunDirectory(out).metrics()]
    return [rows, json.loads((out / "evaluation.json").read_text())["results"]]


def difference(one: Any, two: Any) -> float:
    """The largest one between numbers of two JSON values of the same form."""
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        return max((difference(one[key], two[key]) for key in one), default=0.0)
    if isinstance(one, list):
        assert len(one) == len(two), (one, two)
        return max((difference(a, b) for a, b in zip(one, two, strict=True)), default=0.0)
    if isinstance(one, float) and isinstance(two, float):
        return abs(one - two)
    assert one == two
    return 0.0


def alone(text: str, out: Path, **options: Any) -> Path:
    assert training(ALONE, text, str(out), **options) == ""
    return out


def over(count: int, text: str, out: Path, **options: Any) -> list[str]:
    return on_ranks("training", count, text=text, out=str(out), **options)


def test_two_ranks_write_what_one_process_writes(text: str, tmp_path: Path) -> None:
    one = alone(text, tmp_path / "one")
    assert over(2, text, tmp_path / "two", layout="experts=2") == ["", ""]
    assert difference(content(one), content(tmp_path / "two")) < 1e-10
    names = {"config.json", "environment.json", "evaluation.json", "metrics.jsonl", "vocabulary.json", "checkpoints"}
    assert names <= {entry.name for entry in (tmp_path / "two").iterdir()}
    last = [checkpoint_tensors(open_checkpoint(out / "checkpoints" / "step-6"), name)
            for out in (one, tmp_path / "two") for name in ("model", "trainer")]  # fmt: skip
    for mine, theirs in ((last[0], last[2]), (last[1], last[3])):
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert (tensor.double() - theirs[name].double()).abs().max() < 1e-10 if tensor.numel() else True, name
    assert load_run(tmp_path / "two").step == 6  # as by `export`, `evaluate` and the rest


def test_a_run_moves_between_numbers_of_ranks(text: str, tmp_path: Path) -> None:
    """From one process (one file a checkpoint) to two ranks, and back, with memories, Adam, the monitor's counts."""
    spec, out = "xmoe+attention", tmp_path / "moved"
    unbroken = alone(text, tmp_path / "unbroken", spec=spec)
    assert "after step 1" in training(ALONE, text, str(out), spec=spec, stop=1)
    stopped = over(2, text, out, spec=spec, layout="experts=2", resume=True, stop=5)
    assert all("after step 5" in message for message in stopped)
    assert not list((out / "checkpoints").glob(".*"))
    manifest = json.loads((out / "checkpoints" / "step-5" / "manifest.json").read_text())
    assert manifest["format"] == 2
    assert {name.partition("/")[0] for name in manifest["files"]} == {"model", "trainer", "state.json"}
    alone(text, out, spec=spec, resume=True)
    assert difference(content(unbroken), content(out)) < 1e-12


@pytest.mark.slow
def test_saved_on_four_ranks_it_goes_on_on_any(text: str, tmp_path: Path) -> None:
    spec = "xmoe+attention"
    unbroken = content(alone(text, tmp_path / "unbroken", spec=spec))
    over(4, text, tmp_path / "saved", spec=spec, layout="experts=2", stop=4)
    for count, layout in ((1, ""), (2, ""), (2, "experts=2"), (4, "experts=4")):
        out = Path(shutil.copytree(tmp_path / "saved", tmp_path / f"{count}{layout}"))
        if count == 1:
            alone(text, out, spec=spec, resume=True)
        else:
            assert over(count, text, out, spec=spec, layout=layout, resume=True) == [""] * count
        assert difference(unbroken, content(out)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("spec", [
    "thor", "expert-choice:group=batch", "hyperrouter:share=true", "loss-free", "noisy-topk",
    "smoe:balance=0.05:balance_scope=step", "smoe:balance=0.05:balance_scope=sequence",
])  # fmt: skip
def test_four_ranks_write_what_one_process_writes(spec: str, text: str, tmp_path: Path) -> None:
    one = alone(text, tmp_path / "one", spec=spec, changes={"model.allow_non_causal": True})
    over(4, text, tmp_path / "four", spec=spec, layout="experts=2", changes={"model.allow_non_causal": True})
    assert difference(content(one), content(tmp_path / "four")) < 1e-10


@pytest.mark.slow
def test_masked_language_modelling(tmp_path: Path) -> None:
    """Micro-batches count by their targets, of which a rank may have none."""
    pytest.importorskip("sentencepiece")
    folder = tmp_path / "texts"
    folder.mkdir()
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmno", k=draw.randint(2, 7))) for _ in range(80)]
    for language in ("aa", "bb"):
        lines = [" ".join(draw.choices(words, k=draw.randint(3, 12))) + "." for _ in range(900)]
        (folder / f"{language}.txt").write_text("\n".join(lines))
    masked(ALONE, str(folder), str(tmp_path / "one"))
    on_ranks("masked", 4, texts=str(folder), out=str(tmp_path / "four"), layout="experts=2")
    assert difference(content(tmp_path / "one"), content(tmp_path / "four")) < 1e-10


def test_a_full_disk_and_other_settings_are_one_line_that_names_the_rank(text: str, tmp_path: Path) -> None:
    first, second = on_ranks("full_disk", 2, text=text, out=str(tmp_path / "full"))
    assert first == second
    assert first == (
        f"rank 1: {tmp_path}/full/checkpoints/step-2: File too large; checkpoint step-2 was not written; "
        "what was saved before is untouched"
    )
    assert not list((tmp_path / "full" / "checkpoints").iterdir())
    told = on_ranks("differing", 2, text=text, out=str(tmp_path / "other"))
    assert told == ["ranks differ in the settings: learning_rate: rank 0 has 0.001, rank 1 has 0.002"] * 2


@pytest.mark.slow
def test_translation(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    pytest.importorskip("sacrebleu")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefg", k=number % 4 + 2)) for number in range(20)]
    for stem, count in (("train", 120), ("val", 8), ("test_2016", 8)):
        rows = [[draw.choice(words) for _ in range(draw.randint(2, 5))] for _ in range(count)]
        (tmp_path / f"{stem}.de").write_text("".join(" ".join(row) + "\n" for row in rows))
        (tmp_path / f"{stem}.en").write_text("".join(" ".join(word[::-1] for word in row) + "\n" for row in rows))
    translated(ALONE, str(tmp_path), str(tmp_path / "one"))
    on_ranks("translated", 4, texts=str(tmp_path), out=str(tmp_path / "four"), layout="experts=2")
    assert difference(content(tmp_path / "one"), content(tmp_path / "four")) < 1e-10


@pytest.mark.slow
def test_image_classification(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    draw = random.Random(0)
    for part, count in (("train", 12), ("valid", 4), ("test", 6)):
        for name in ("a", "b", "c"):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                image.frombytes("RGB", (8, 8), draw.randbytes(192)).save(folder / f"{index}.png")
    pictured(ALONE, str(tmp_path / "images"), str(tmp_path / "one"))
    on_ranks("pictured", 4, folder=str(tmp_path / "images"), out=str(tmp_path / "four"), layout="experts=2")
    assert difference(content(tmp_path / "one"), content(tmp_path / "four")) < 1e-10


@pytest.mark.parametrize(("broken", "first"), [
    (4, "the loss is nan; the first output that is not finite is that of layer layers.1.moe.experts;"),
    (-4, "the gradient's norm is nan; the first gradient that is not finite is that of layers.1.attention_norm.bias;"),
])  # fmt: skip
def test_divergence_on_one_rank_is_the_line_of_one_process_on_all(
    broken: int, first: str, text: str, tmp_path: Path
) -> None:
    one = training(ALONE, text, str(tmp_path / "one"), broken=broken)
    assert one.startswith(f"step 4: {first} the last good checkpoint is step-2;")
    assert over(2, text, tmp_path / "two", layout="experts=2", broken=broken) == [one] * 2
    assert [entry.name for entry in (tmp_path / "two" / "checkpoints").iterdir()] == ["step-2"]  # whole
    assert over(2, text, tmp_path / "two", layout="experts=2", resume=True) == [""] * 2


def test_ranks_that_do_not_divide_the_batch_are_refused(text: str, tmp_path: Path) -> None:
    config = run_config(text)
    task = LanguageModelling.open(config)
    with pytest.raises(RunError, match="3 ranks cannot share batch_size=8 in accumulation=2 parts evenly; 1, 2, 4 can"):
        TrainingState(task.prepared(config), task, torch.device("cpu"), ranks=Ranks(0, 3))


@pytest.mark.parametrize(("count", "shares"), [(5, [[0, 2, 4], [1, 3, None]]), (1, [[0], [None]]), (0, [[], []])])
def test_ranks_share_batches_and_read_equally_many(count: int, shares: list[list[int | None]]) -> None:
    for rank, share in enumerate(shares):
        found = own_share(range(count), count, Ranks(rank, 2))
        assert [batch if counts else None for batch, counts in found] == share


def test_a_rank_without_targets_has_no_part_in_the_loss() -> None:
    targets = torch.full((2, 3), -100)
    assert with_a_target(targets).tolist() == [[0, -100, -100], [-100] * 3]
    objective = Objective("plain", 1, None, weighted_by_targets=True)  # type: ignore[arg-type]
    other = torch.tensor([[1, 2, -100]])

    class Two(Ranks):
        def total(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
            return [tensor + torch.tensor([3.0, 0.0]).double() for tensor in tensors]

    assert objective.shares([targets, other], Two(0, 2)) == [0.0, torch.tensor(0.4).double()]  # as one process rounds
    assert Objective("plain", 1, None).shares([targets, other], Two(0, 2)) == [0.0, 0.5]  # type: ignore[arg-type]
    assert Objective("plain", 1, None).shares([other], Two(0, 2), even=True) == [0.5]  # type: ignore[arg-type]
