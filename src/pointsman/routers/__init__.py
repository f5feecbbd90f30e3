"""Routers, one file a paper. Adding one = one new file and one import line here. Installed packages add theirs."""

from pointsman.routers import hyper, mutual, smoe_dropout, thor, topk, xmoe
from pointsman.routers.elsewhere import load_installed

__all__ = ["hyper", "mutual", "smoe_dropout", "thor", "topk", "xmoe"]

load_installed()
