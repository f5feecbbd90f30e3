"""Any Hugging Face MoE: audit it, serve it at any k, give it a better router."""

try:
    import transformers  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("pointsman.hf needs transformers: pip install 'pointsman[hf]'") from error

from pointsman.hf import experts as _experts

_experts.register()
