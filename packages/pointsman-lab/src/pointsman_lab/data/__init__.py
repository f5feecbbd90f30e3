"""Corpora, vocabularies and streams of segments: what several tasks read."""
