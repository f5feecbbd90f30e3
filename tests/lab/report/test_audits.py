"""The report of audits of Hugging Face models."""

import html
import json
import re
from pathlib import Path

import pytest

from pointsman_lab.checkpoints import audit
from pointsman_lab.report import audits, figures, write_report
from tests.library.hf import zoo
from tests.library.hf.test_replace import spread
from tests.library.hf.zoo import texts, tokenizer

pytest.importorskip("jinja2")


def test_the_report_reads_it(tmp_path: Path) -> None:
    domains = {"en.txt": texts(12), "de.txt": texts(12, seed=3)}
    result = audit(spread(zoo.tiny_model("mixtral")), tokenizer(), domains, top_k=[1, 2])
    result.save(tmp_path / "audit", data="a few words", command="pointsman audit some-model --data words")
    notes: list[str] = []
    page = write_report(tmp_path / "audit", samples=True, note=notes.append).read_text(encoding="utf-8")
    assert "audit" in {file.stem for file in figures(tmp_path / "audit", ["svg"])}
    assert not notes
    assert "pointsman audit some-model --data words" in page
    assert 'id="loss"' not in page
    assert all(html.escape(sentence) in page for sentence in result.findings())
    assert "MixtralForCausalLM" in page
    order = ["Load of every expert", "Findings", "Loss at every k", "Change of the loss", "Routing by layer",
             "Routing by domain", "Domains apart",
             "Coverage for calibration", "Super experts", "Experts that go together", "k by layer",
             "Cost to serve", "Expert-parallel placement", "Cache of hot experts"]  # fmt: skip
    places = [page.index(f"<h3>{title}") for title in order]
    assert places == sorted(places)
    assert "`" not in page[places[0] : page.index('id="result"')]
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', page)[1])
    of = next(iter(data["audits"].values()))["of"]
    assert list(of) == ["all", "en.txt", "de.txt"]
    assert of["all"] == [layer["load"]["share"] for layer in result.layers.values()]
    assert "(the first two principal components)" in page
    assert "UMAP" not in page
    assert "Tokens to an answer" not in page  # no task was given
    assert "tokens a prompt" not in result.markdown()
    assert "a few words" in page
    assert (tmp_path / "audit" / "audit.md").read_text().startswith("# Audit of MixtralForCausalLM")


def test_two_audits_of_one_class_and_one_without_a_sample(tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    for name, tokens in (("before", 64), ("after", 0)):
        audit(model, tokenizer(), texts(8), top_k=[1], sample_tokens=tokens).save(tmp_path / name)
    page = write_report([tmp_path / "before", tmp_path / "after"], out=tmp_path, samples=True).read_text("utf-8")
    assert "MixtralForCausalLM (before)" in page
    assert "MixtralForCausalLM (after)" in page
    assert not (tmp_path / "after" / "explorer.json").exists()


def test_the_tables_of_an_audit_by_hand() -> None:
    layer = {
        "num_experts": 4, "load": {"share": [0.8, 0.19, 0.01, 0.0], "dead": [3], "effective": 2.0},
        "domains": {"en": {"share": [0.5, 0.5, 0.0, 0.0], "entropy": 0.7, "margin": 0.1}, "de": {"share": [0.25] * 4}},
    }  # fmt: skip
    quality = [
        {"top_k": k, "loss": loss, "half": 0.1, "difference": None if k == 2 else {"mean": loss - 2.0, "half": 0.5}}
        for k, loss in ((1, 2.5), (2, 2.0))
    ]
    apart = [
        {"domains": ["en", "de"], "mean": mean, "half": half} for mean, half in ((0.3, 0.2), (0.1, 0.2), (0.3, None))
    ]
    audit = {"top_k": 2, "quality": quality, "layers": {"layers.3.mlp": layer}, "domains": {"en": 5, "de": 5},
             "divergence": apart}  # fmt: skip
    parts = {part["title"]: part["grid"] for part in audits._parts(audit)}
    of = dict(zip(parts["Routing by layer"].header, parts["Routing by layer"].rows[0], strict=True))
    told = ("in use", "dead", "nearly dead", "hot")
    assert [of[name] for name in told] == ["2.0 of 4", "1", "1", "1"], "a dead expert is not nearly dead"
    assert parts["Change of the loss with k"].rows == [["1", "+0.5000 ± 0.5000", "-", "-"]], "not of the own k"
    assert parts["Routing by domain"].rows[2] == ["layer 3", "experts in use", "2.0", "4.0"]
    verdicts = [row[-1] for row in parts["Domains apart"].rows]
    assert verdicts == ["differ", "no difference beyond chance", "too few blocks"]
