"""Tensor functions that several rooms use: products, attention, cross entropy, selection, the choice of kernels."""
