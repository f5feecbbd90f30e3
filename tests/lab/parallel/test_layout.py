"""Layouts: what they divide, and what they refuse."""

import pytest
from torch import nn

from pointsman import MoE
from pointsman._errors import RunError
from pointsman.parallel.layout import Layout
from pointsman.parallel.shard import check_layers


def test_the_parts_multiply_to_the_world():
    layout = Layout.parse("experts=4,replicas=2", 64)
    assert (layout.shards, layout.expert_shards, str(layout)) == (32, 8, "experts=4,replicas=2")
    assert layout.replicas * layout.expert_shards * layout.experts == layout.world
    assert str(Layout.parse("", 8)) == "shards"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("expert=2", "did you mean 'experts'"),
        ("experts=3", "experts=3 does not divide 8 ranks (8 ranks / 1 replicas); 1, 2, 4, 8 do"),
        ("replicas=3", "replicas=3 does not divide 8 ranks; 1, 2, 4, 8 do"),
        ("experts=8,replicas=2", "experts=8 does not divide 4 ranks"),
        ("experts=two", "write experts=N"),
        ("experts", "write experts=N"),
        ("experts=0", "allowed are whole numbers from 1"),
        ("experts=2,experts=4", "experts is given twice"),
        ("experts=²", "write experts=N"),
        (f"experts={10**30}", "write experts=N"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(text: str, told: str):
    with pytest.raises(RunError) as error:
        Layout.parse(text, 8)
    assert told in str(error.value)


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(RunError, match="experts=8 does not divide the 12 experts of a layer; 1, 2, 3, 4, 6, 12 do"):
        Layout(8, experts=8).check_experts(12)


@pytest.mark.parametrize("spec", ["compete", "smoe:capacity=1.0:capacity_scope=batch", "xmoe:dense_gradient=true"])
def test_what_one_process_alone_trains_is_refused(spec: str):
    model = nn.Sequential(MoE(8, 8, 4, router=spec))
    assert list(check_layers(model, Layout(1))) == ["0"]
    with pytest.raises(RunError, match=f"layer '0': router '{spec}' trains in one process: "):
        check_layers(model, Layout(2))
