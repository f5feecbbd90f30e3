"""Hugging Face MoE models: evaluated at any k, balanced, with other routers, or made of dense models."""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as none:  # pragma: no cover
    raise ModuleNotFoundError("pointsman.hf needs transformers: pip install 'pointsman[hf]'", name=none.name) from none

from pointsman.hf import experts as _experts
from pointsman.hf.balance import balance
from pointsman.hf.replay import replay
from pointsman.hf.steps import RoutingLog, StepEnd
from pointsman.hf.surgery import attention as _attention
from pointsman.hf.surgery import replace as _replace
from pointsman.hf.surgery.materialize import materialize
from pointsman.hf.surgery.replace import replace_routers
from pointsman.hf.surgery.upcycle import upcycle
from pointsman.hf.verify import verify

_attention.register()
_experts.register()
_replace.install()

__all__ = ["RoutingLog", "StepEnd", "balance", "materialize", "replace_routers", "replay", "upcycle", "verify"]
