"""The plainest spec of a router: one for equal compositions, and the router that it names."""

from __future__ import annotations

import pytest

from pointsman import build_router, list_routers
from pointsman_lab.canonical import canonical, same_routers


@pytest.mark.parametrize("name", list_routers())
def test_compositions_of_a_name_have_plainest_specs_of_the_same_router(name: str) -> None:
    assert canonical(f"{name}@{name}") == canonical(name) == name
    for other in list_routers():
        spec = f"{name}@{other}"
        try:
            router = build_router(spec, dim=8, num_experts=4, vocab_size=64)
        except ValueError:
            continue
        plainest = canonical(spec)
        assert canonical(plainest) == plainest
        built = build_router(plainest, dim=8, num_experts=4, vocab_size=64)
        assert built.state_dict().keys() == router.state_dict().keys()


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ("smoe:bias=false:gate=sigmoid@loss-free:rate=0.01", "loss-free:rate=0.01"),
        ("gshard@top-p", "top-p"),
        ("xmoe:gate=softmax:balance=0.01", "xmoe"),
        ("hyperrouter@smoe:balance=0.1", "hyperrouter:balance=0.1"),
        ("hyperrouter@recurrent", "hyperrouter"),
        ("smoe@xmoe:balance=0.01", "smoe@xmoe"),
        ("hyperrouter@loss-free:nulls=1+similarity:tau=0.2", "hyperrouter@loss-free:nulls=1+similarity:tau=0.2"),
        ("loss-free:gate=softmax:bias=true", "smoe@loss-free"),
    ],
)
def test_equal_compositions_have_one_plainest_spec(spec: str, same: str) -> None:
    assert canonical(spec) == canonical(same)


def test_rows_of_the_same_router_are_named() -> None:
    specs = ["smoe|xmoe", "smoe", "dense", "smoe@smoe", "xmoe@loss-free", "smoe@smoe|xmoe:gate=softmax"]
    assert same_routers(specs) == [("smoe@smoe", "smoe"), ("smoe@smoe|xmoe:gate=softmax", "smoe|xmoe")]
