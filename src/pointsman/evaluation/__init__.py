"""Evaluation: quality at any k, and paired comparisons."""
