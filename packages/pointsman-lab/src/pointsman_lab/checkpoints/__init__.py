"""Hugging Face mixtures of experts: what their routers do (`audit`), and with fewer experts (`compress`)."""

from pointsman_lab.checkpoints.audit import AuditResult, audit
from pointsman_lab.checkpoints.compress import Compression, compress

__all__ = ["AuditResult", "Compression", "audit", "compress"]
