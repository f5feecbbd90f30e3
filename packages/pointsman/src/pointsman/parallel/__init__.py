"""Many processes: how ranks share a model."""

STORE = "POINTSMAN_RANKS_STORE"
"""Environment variable: a file through which the ranks find each other, instead of torchrun's address."""
