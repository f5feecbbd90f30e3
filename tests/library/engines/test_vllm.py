"""Our routers as vLLM's custom routing function, in vLLM's own fused MoE on a CPU, where vLLM is installed."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pointsman
from pointsman import build_router
from pointsman.engines.vllm import RoutingFunction
from tests.library.engines.test_engines import CARRIED

DIM, HIDDEN, EXPERTS = 32, 32, 4  # vLLM's CPU kernels take multiples of 32
SPECS = [spec for spec in CARRIED if spec not in ("switch", "forced")]
"""`switch` has k = 1; `forced` looks at the other tokens of the batch in evaluation, too."""
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.fixture(scope="module")
def config() -> Iterator[Any]:
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = VllmConfig()
    with set_current_vllm_config(found):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield found


def outputs(config: Any, spec: str, ours: pointsman.MoE, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """vLLM's and our layer's output of the same tokens, with the same experts."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory

    torch.manual_seed(1)
    layer: Any = FusedMoEFactory(
        num_experts=EXPERTS, top_k=2, hidden_size=DIM, intermediate_size=HIDDEN, params_dtype=dtype,
        prefix=f"{spec} {dtype} {settings}", **settings,
    )  # fmt: skip
    experts, hidden = layer.routed_experts, torch.randn(7, DIM, dtype=dtype)
    with torch.no_grad():
        up, down = (
            torch.nn.init.normal_(one, std=0.1).float().clone() for one in (experts.w13_weight, experts.w2_weight)
        )
        ours.experts.load_state_dict({"w_gate": up[:, :HIDDEN], "w_in": up[:, HIDDEN:], "w_out": down})
        experts.quant_method.process_weights_after_loading(experts)
        with set_forward_context(None, config, num_tokens=len(hidden)):
            weight = getattr(ours.router.score, "weight", torch.zeros(EXPERTS, DIM))
            found = layer(hidden, hidden @ weight.to(dtype).T)
        return found.float(), ours(hidden[None].float())[0]


def our_layer(spec: str) -> pointsman.MoE:
    torch.manual_seed(0)
    shape = {"activation": "silu", "gated": True, "bias": False}
    return pointsman.MoE(DIM, HIDDEN, EXPERTS, top_k=2, router=spec, **shape).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", SPECS)
def test_vllms_layer_with_our_routing_function_equals_our_layer(config: Any, spec: str) -> None:
    ours = our_layer(spec)
    given = {"custom_routing_function": RoutingFunction(ours.router), "renormalize": False}
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
        torch.testing.assert_close(*outputs(config, spec, ours, dtype, **given), rtol=0, atol=near)


def test_vllms_own_router_equals_our_spec_of_it(config: Any) -> None:
    for renormalize in (True, False):
        spec = f"smoe:bias=false:renormalize={str(renormalize).lower()}"
        own, ours = outputs(config, spec, our_layer(spec), renormalize=renormalize)
        torch.testing.assert_close(own, ours, rtol=1e-4, atol=1e-5)


def test_the_routing_function_says_what_it_cannot_do() -> None:
    router = build_router("xmoe:balance=0", dim=DIM, num_experts=EXPERTS, top_k=2)
    function, hidden = RoutingFunction(router), torch.randn(7, DIM)
    weights, experts = function(hidden_states=hidden, gating_output=hidden, topk=2, renormalize=False)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int32)
    with pytest.raises(ValueError, match="k = 2"):
        function(hidden, hidden, 1, False)
    with pytest.raises(ValueError, match="renormalize=True"):
        function(hidden, hidden, 2, True)
    with pytest.raises(ValueError, match="looks at other tokens"):
        RoutingFunction(build_router("forced", dim=DIM, num_experts=EXPERTS, top_k=2))
