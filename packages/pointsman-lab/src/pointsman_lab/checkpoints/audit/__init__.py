"""audit: quality at every k and routing statistics of a Hugging Face MoE."""

from pointsman_lab.checkpoints.audit.measure import audit
from pointsman_lab.checkpoints.audit.result import AuditResult

__all__ = ["AuditResult", "audit"]
