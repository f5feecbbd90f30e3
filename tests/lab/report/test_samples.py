"""What explorer.json holds, against the model itself; maps; and how samples are cut to fit a page."""

import base64
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pointsman._errors import RunError
from pointsman.routing import Routing
from pointsman_lab.data.vocabulary import Vocabulary
from pointsman_lab.evaluation.explorer import most_taken, pack, pca
from pointsman_lab.report import inside, write_report
from pointsman_lab.report.samples import collect_all, collect_samples, display_tokens
from pointsman_lab.runs.comparison import read_comparison
from pointsman_lab.tasks.language_modelling.task import corpus_of
from tests.lab.report.fixtures import write_comparison
from tests.lab.report.test_page import Page


def unpacked(sample: dict[str, Any], k: int, layer: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities [T, E], first experts [T] and chosen [T, E]: read byte by byte, as the page's script does."""
    raw = zlib.decompress(base64.b64decode(sample["routing"]))
    tokens, experts = len(sample["tokens"]), sample["num_experts"]
    width, size = -(-experts // 8), 1 if experts <= 255 else 2
    layers, ks, block = len(sample["layers"]), len(sample["top_k"]), experts + size + width
    place = sample["layers"].index(layer) * ks + sample["top_k"].index(k)
    starts = [(t * layers * ks + place) * block for t in range(tokens)]
    probs = np.array([[(raw[at + e] / 127) ** 2 for e in range(experts)] for at in starts])
    first = np.array([int.from_bytes(raw[at + experts : at + experts + size], "little") for at in starts])
    chosen = [[raw[at + experts + size + (e >> 3)] >> (e & 7) & 1 for e in range(experts)] for at in starts]
    return probs, first, np.array(chosen, dtype=bool)


def packed(seen: dict[int, dict[str, Routing]], text: str = "a" * 40, points: int = 40) -> dict[str, Any]:
    inputs = {name: torch.randn(len(text), 3, generator=torch.Generator().manual_seed(0)) for name in seen[1]}
    return pack(seen, list(text), inputs, 1, points)


def made_up(tokens: int = 40, experts: int = 11) -> dict[int, dict[str, Routing]]:
    generator = torch.Generator().manual_seed(3)
    seen: dict[int, dict[str, Routing]] = {1: {}, 3: {}}
    for k in seen:
        for name in ("layers.0", "layers.2"):
            logits = 2 * torch.randn(tokens, experts, generator=generator)
            weights, chosen = logits.softmax(-1).topk(k, dim=-1)
            seen[k][name] = Routing(chosen, weights, logits.softmax(-1), logits)
    return seen


def test_both_axes_of_a_map_have_one_scale() -> None:
    corners = torch.tensor([[0.0, 0, 0], [4, 0, 0], [0, 2, 0], [4, 2, 0]])
    flat = pack({1: {"a": made_up(4)[1]["layers.0"]}}, list("abcd"), {"a": corners}, 1, 4)["map"]["layers"]["a"]
    assert [max(axis) - min(axis) for axis in flat] == [1000, 500]


@pytest.mark.parametrize("experts", [11, 255, 256, 300])
def test_packed_routing_reads_back(experts: int) -> None:
    seen = made_up(experts=experts)
    sample = packed(seen)
    for k in (1, 3):
        for name in ("layers.0", "layers.2"):
            probs, first, chosen = unpacked(sample, k, name)
            routing = seen[k][name]
            assert np.abs(probs - routing.probs.numpy()).max() < 0.0081
            assert first.tolist() == routing.experts[:, 0].tolist()
            assert [set(np.flatnonzero(row)) for row in chosen] == [set(row) for row in routing.experts.tolist()]


@pytest.mark.parametrize(("experts", "none"), [(11, 255), (300, 65535)])
def test_tokens_without_an_expert(experts: int, none: int) -> None:
    seen = made_up(experts=experts)
    routing = seen[1]["layers.0"]
    routing.experts[5], routing.experts[6] = -1, experts - 1
    sample = packed(seen)
    _, first, chosen = unpacked(sample, 1, "layers.0")
    assert (first[5], chosen[5].any(), chosen[6].sum()) == (none, False, 1)
    assert sample["map"]["first"]["layers.0"][5:7] == [None, experts - 1]
    assert np.array(sample["map"]["layers"]["layers.0"]).shape == (2, 40)
    few = packed(seen, "abcdefgh" * 5, 3)["map"]
    assert few["tokens"] == ["a", "d", "h"]
    assert few["first"]["layers.2"] == seen[1]["layers.2"].experts[[0, 19, 39], 0].tolist()


def test_a_foreign_sample_is_none_of_ours() -> None:
    whole = packed(made_up())
    assert inside.readable(whole)
    assert not inside.readable({**whole, "format": 2})
    assert not inside.readable({key: value for key, value in whole.items() if key != "routing"})
    assert not inside.readable({})


@pytest.mark.parametrize("experts", [11, 300])
def test_cutting_keeps_the_first_tokens(experts: int) -> None:
    sample = packed(made_up(experts=experts), "abcdefgh" * 5)
    short = packed(made_up(13, experts), "abcdefghabcde")
    shown = inside.explorer({"smoe": {**sample, "seed": 0}, "xmoe": {**short, "seed": 1}})
    cut = {**sample, "tokens": shown["texts"][0], "routing": shown["routers"][0]["routing"]}
    assert cut["tokens"] == short["tokens"]
    for k in (1, 3):
        for whole, part in zip(unpacked(sample, k, "layers.2"), unpacked(cut, k, "layers.2"), strict=True):
            assert np.array_equal(whole[:13], part)


@pytest.mark.slow
def test_page_stays_small_with_many_routers(tmp_path: Path) -> None:
    routers = ["smoe", "hyperrouter", *(f"smoe:noise=0.{n}" for n in range(1, 8))]
    path = write_comparison(tmp_path / "c", routers, (0,), top_k=(1, 2, 4, 8, 16), experts=16, explorer=True)
    page = write_report(path)
    assert page.stat().st_size < 2_200_000
    explorer = Page(page.read_text()).data["inside"]["explorer"]
    assert len(explorer["routers"]) == 9
    assert len(explorer["texts"][0]) >= 200


def test_most_taken_counts() -> None:
    chosen = np.array([[1, 0], [1, 1], [0, 1], [1, 0]], dtype=bool)
    assert most_taken(chosen, ["x", "y", "x", "x"]) == [
        [["x", 2, 0.667], ["y", 1, 1.0]],
        [["x", 1, 0.333], ["y", 1, 1.0]],
    ]


def test_display_of_bytes_and_words() -> None:
    text = "aé漢\n\xff".encode() + b"\xff\xe6\xbc"
    symbols = sorted(set(text))
    ids = np.array([symbols.index(byte) for byte in text])
    shown = display_tokens(ids, Vocabulary("byte", symbols))
    assert shown == ["a", "é", "·", "漢", "·", "·", "\n", "ÿ", "·", "�", "�", "�"]
    assert display_tokens(np.array([1, 2]), Vocabulary("word", ["<unk>", "the", "<eos>"])) == ["the", "\n"]


def test_pca_of_a_line_and_of_one_point() -> None:
    along = np.outer(np.linspace(-2, 2, 30), [3.0, 4.0, 0.0])
    found = pca(along + 7)
    assert np.allclose(np.abs(found[:, 0]), np.abs(np.linspace(-10, 10, 30)))
    assert np.allclose(found[:, 1], 0)
    assert np.array_equal(pca(np.ones((1, 5))), np.zeros((1, 2)))


@pytest.mark.slow
def test_samples_of_a_real_run_are_the_models_own(trained: Path) -> None:
    from pointsman.control import set_top_k
    from pointsman.recording import record_routing
    from pointsman_lab.training.run import load_run

    path = trained / "runs" / "smoe" / "seed-0"
    assert collect_samples(path, tokens=40, points=25) == path / "explorer.json"
    sample = json.loads((path / "explorer.json").read_text())
    assert (sample["checkpoint"], sample["top_k"], len(sample["tokens"])) == ("step-6", [1, 2, 4], 40)
    run = load_run(path)
    ids = torch.tensor(np.asarray(corpus_of(run).split("test")[:16]).astype(np.int64))[None]
    text = Path(run.config.data).read_text()
    assert "".join(token for token in sample["tokens"] if token != "·")[:30] in text
    with set_top_k(run.model, 2), record_routing(run.model) as records, torch.no_grad():
        run.model(ids)
    for name in sample["layers"]:
        probs, _, chosen = unpacked(sample, 2, name)
        assert np.abs(probs[:16] - records[name].probs.numpy()).max() < 0.0081
        assert chosen.sum() == 2 * 40


@pytest.mark.slow
def test_page_samples_on_request_once(trained: Path) -> None:
    notes: list[str] = []
    page = Page(write_report(trained, samples=True, note=notes.append).read_text())
    assert [one["name"] for one in page.data["inside"]["explorer"]["routers"]] == ["smoe"]
    collect_all(read_comparison(trained), note=notes.append)
    assert len(notes) <= 1
    for change in ({"split": "valid"}, {"top_k": [1]}):  # evaluated anew on another part, or at other k
        file = trained / "runs" / "smoe" / "seed-0" / "explorer.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        notes.clear()
        collect_all(read_comparison(trained), note=notes.append)
        assert notes == ["sampling the routing of smoe"]


def test_a_page_elsewhere_leaves_the_run_as_it_is(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained / "runs" / "smoe" / "seed-0", tmp_path / "run"))
    (run / "explorer.json").unlink(missing_ok=True)
    before = sorted(run.rglob("*"))
    page = Page(write_report(run, tmp_path / "page.html", samples=True).read_text())
    assert [one["name"] for one in page.data["inside"]["explorer"]["routers"]] == ["smoe"]
    assert sorted(run.rglob("*")) == before


def test_what_cannot_be_sampled_is_told(tmp_path: Path) -> None:
    notes: list[str] = []
    path = write_comparison(tmp_path / "c", ("smoe",), (0,))
    assert write_report(path, samples=True, note=notes.append).exists()
    assert notes == ["no sample of smoe: its weights are not here"]


def test_nothing_is_sampled_for_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    notes: list[str] = []
    path = write_comparison(tmp_path / "c", ("smoe",), (0,))
    with pytest.raises(RunError, match="nothing was begun"):
        write_report(path, path / "comparison.json" / "page.html", samples=True, note=notes.append)
    assert notes == []


def test_dense_runs_have_no_sample(trained: Path) -> None:
    assert collect_samples(trained / "runs" / "dense" / "seed-0") is None
