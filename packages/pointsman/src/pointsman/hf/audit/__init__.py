"""audit: quality at every k and routing statistics of a Hugging Face MoE."""

from pointsman.hf.audit.measure import audit
from pointsman.hf.audit.result import AuditResult

__all__ = ["AuditResult", "audit"]
