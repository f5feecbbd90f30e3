"""Decoders as models of transformers, and models of transformers as decoders: same weights, same logits."""
