"""audit: measures a Hugging Face MoE by hooks."""

from pointsman.hf.audit.measure import audit
from pointsman.hf.audit.result import AuditResult

__all__ = ["AuditResult", "audit"]
