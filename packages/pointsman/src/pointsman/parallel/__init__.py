"""Many processes: how ranks share a model."""
