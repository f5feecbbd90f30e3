"""Routers, one file a paper. Adding one = one new file and one import line here. Installed packages add theirs."""

from pointsman.routers import gshard, hyper, loss_free, mutual, noisy_topk, smoe_dropout, thor, topk, xmoe
from pointsman.routers.elsewhere import load_installed

__all__ = ["gshard", "hyper", "loss_free", "mutual", "noisy_topk", "smoe_dropout", "thor", "topk", "xmoe"]

load_installed()
