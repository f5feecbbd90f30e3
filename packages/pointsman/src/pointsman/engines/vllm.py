"""Our routers in vLLM's fused MoE (0.32): a custom routing function, for routers that its linear gate cannot represent.

    FusedMoEFactory(…, custom_routing_function=RoutingFunction(router), renormalize=False)

Inference only. A router that a linear gate represents needs none of this: `pointsman.materialize` gives its weight.
"""

import torch
from torch import Tensor

from pointsman.engines.common import carried
from pointsman.routers.frame.router import Router

ENGINE = "vLLM"


class RoutingFunction:
    """(hidden_states, gating_output, topk, renormalize) -> weights [tokens, k] float32 and experts [tokens, k] int32.

    Args:
        router: a trained router, in evaluation mode.

    Raises:
        ValueError: vLLM's kernels cannot carry the router, or it looks at other tokens: vLLM's batches mix requests.
    """

    def __init__(self, router: Router) -> None:
        carried(ENGINE, router.spec, dim=router.dim, num_experts=router.num_experts, top_k=router.top_k, trains=False)
        if not (router.causal and router.batch_invariant):
            raise ValueError(f"{ENGINE}: router {router.spec!r}: it looks at other tokens, and a batch mixes requests")
        self.router = router.eval()

    @torch.no_grad()
    def __call__(
        self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        """Routes; `gating_output`, vLLM's own gate's logits, is not read.

        Raises:
            ValueError: another k than the router's, or `renormalize`, which the router's spec says.
        """
        if topk != self.router.top_k:
            raise ValueError(f"{ENGINE}: topk={topk}, its router has k = {self.router.top_k}; set_top_k changes it")
        if renormalize:
            raise ValueError(f"{ENGINE}: renormalize=True: set False; the spec says how weights are normalised")
        routing = self.router(hidden_states[None])
        return routing.weights.float(), routing.experts.to(torch.int32)
