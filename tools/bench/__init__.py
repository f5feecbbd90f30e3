"""Layers, models and mixers beside others of the same shape; benchmarks/README.md says what is measured and how."""
