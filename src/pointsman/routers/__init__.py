"""Routers, one file a paper. Adding one = one new file and one import line here."""

from pointsman.routers import hyper, mutual, smoe_dropout, thor, topk, xmoe

__all__ = ["hyper", "mutual", "smoe_dropout", "thor", "topk", "xmoe"]
