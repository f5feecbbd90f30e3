"""The pages below docs/results, made from the records in it: `python -m tools.results`."""
