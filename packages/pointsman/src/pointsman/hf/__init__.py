"""Hugging Face MoE models: audit them, evaluate them at any k, replace their routers, upcycle dense models."""

try:
    import transformers  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("pointsman.hf needs transformers: pip install 'pointsman[hf]'", name="transformers") from error

from pointsman.hf import experts as _experts
from pointsman.hf.audit import AuditResult, audit
from pointsman.hf.balance import balance
from pointsman.hf.compress import Compression, compress
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

__all__ = [
    "AuditResult",
    "Compression",
    "RoutingLog",
    "StepEnd",
    "audit",
    "balance",
    "compress",
    "materialize",
    "replace_routers",
    "replay",
    "upcycle",
    "verify",
]
