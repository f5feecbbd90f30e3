"""Any Hugging Face MoE: audit it, serve it at any k, give it a better router."""

try:
    import transformers  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("pointsman.hf needs transformers: pip install 'pointsman[hf]'", name="transformers") from error

from pointsman.hf import attention as _attention
from pointsman.hf import experts as _experts
from pointsman.hf import replace as _replace
from pointsman.hf.audit import audit
from pointsman.hf.audit_result import AuditResult
from pointsman.hf.materialize import materialize
from pointsman.hf.replace import replace_routers
from pointsman.hf.steps import StepEnd
from pointsman.hf.upcycle import upcycle

_attention.register()
_experts.register()
_replace.install()

__all__ = ["AuditResult", "StepEnd", "audit", "materialize", "replace_routers", "upcycle"]
