"""The exam: routers on tasks whose best routing is known.

Read `task.py` (what a task is), then `clusters.py` (the simplest ones), `run.py` (one run) and `cell.py` (rates).
"""
