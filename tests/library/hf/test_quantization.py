"""Int8 by torchao, as the page on deployment has it: routers stay as they are."""

import copy
import warnings

import pytest
import torch
from torch import nn

from pointsman import MoE, hf
from tests.library.hf import zoo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchao = pytest.importorskip("torchao.quantization")


def outside_routers(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and ".pointsman." not in name and ".router." not in name


def quantised(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    torchao.quantize_(copied, torchao.Int8WeightOnlyConfig(), filter_fn=outside_routers)
    return copied


def changed(model: nn.Module) -> set[str]:
    """The last parts of the names of all quantised layers."""
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name.rpartition(".")[2] for name, module in linear if type(module.weight) is not nn.Parameter}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", ["hyperrouter", "xmoe+similarity"])
def test_a_model_with_replaced_routers(spec: str) -> None:
    model = hf.replace_routers(zoo.tiny_model("mixtral"), spec, start="fresh").eval()
    small, ids = quantised(model), torch.arange(3, 27)[None]
    assert changed(small) == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
    with torch.no_grad():
        expected, given = model(ids).logits, small(ids).logits
    assert float((given - expected).norm()) < 0.1 * float(expected.norm())


@pytest.mark.filterwarnings("ignore")
def test_our_layer() -> None:
    model = nn.Sequential(nn.Linear(32, 32), MoE(32, 64, 8, router="xmoe+similarity")).eval()
    small, hidden = quantised(model), torch.randn(2, 9, 32)
    assert changed(small) == {"0"}
    with torch.no_grad():
        assert torch.equal(small[1](hidden), model[1](hidden))
        torch.testing.assert_close(small[0](hidden), model[0](hidden), rtol=0.1, atol=0.05)
