"""Evaluation: quality at any k, of language models and classifiers, clean and attacked."""
