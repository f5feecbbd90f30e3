"""Mutual-Inform (Nguyen et al. 2025): the similarity and attention mixers, and their streaming kernels."""

from pointsman.routers.mutual import mixers

__all__ = ["mixers"]
