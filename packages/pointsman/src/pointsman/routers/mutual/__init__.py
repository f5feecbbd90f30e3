"""Mutual-Inform (Nguyen et al. 2025): the similarity and attention mixers, and their streaming kernels."""

from pointsman.routers.mutual import controls, mixers

__all__ = ["controls", "mixers"]
