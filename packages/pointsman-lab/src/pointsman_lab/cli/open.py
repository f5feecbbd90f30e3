"""`pointsman open FILE`: see `share`."""

from pointsman_lab.cli.share import open_parser as parser
from pointsman_lab.cli.share import run_open as run

__all__ = ["parser", "run"]
