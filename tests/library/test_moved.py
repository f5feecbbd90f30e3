"""What the laboratory has now is named by one line where it was (of `hf`: hf/test_loading.py)."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "name", "place"),
    [
        ("pointsman.diagnostics", "diagnose", "pointsman_lab.evaluation.diagnose.diagnose"),
        ("pointsman.traces", "compare", "pointsman_lab.traces.compare"),
    ],
)
def test_a_name_that_moved_says_where(module: str, name: str, place: str) -> None:
    found = importlib.import_module(module)
    with pytest.raises(ImportError, match=rf"^{module}\.{name} is now {place}: pip install 'pointsman\[lab\]'$"):
        getattr(found, name)
    assert not hasattr(found, "nothing")
