"""Every MoE class in the installed transformers: supported, or refused with a reason; the page says the same."""

import re

import pytest
import transformers

from tests.lab.checkpoints import compatibility
from tests.library.hf import zoo

LEAST = {
    "audit": 60,
    "router": 58,
    "set_top_k": 55,
    "replace_routers": 55,
    "mixers": 55,
    "materialize": 55,
    "experts": 55,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_class_works_or_is_refused_with_a_reason() -> None:
    rows = compatibility.examine_all()
    assert len(rows) == len(zoo.moe_modules())
    assert not {row.kind: row.crashed for row in rows if row.crashed}
    for row in rows:
        assert all(len(reason) > 10 for reason in row.results.values() if reason)
    works = {feature: sum(not row.results[feature] for row in rows) for feature in LEAST}
    assert all(works[feature] >= least for feature, least in LEAST.items()), works
    written = compatibility.PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__} " in written:
        assert written == compatibility.page(rows), "run: python tests/lab/checkpoints/compatibility.py --write"


def test_the_page_names_every_class() -> None:
    written = compatibility.PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| \w+ \| `(\w+)` \|", written, re.MULTILINE))
    if f"transformers {transformers.__version__} " in written:
        assert named == set(zoo.moe_modules())
