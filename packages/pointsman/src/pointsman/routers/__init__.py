"""Routers, one file a paper. Adding one = one new file and one import line here. Installed packages add theirs."""

from pointsman.routers import mutual as mutual
from pointsman.routers.frame.elsewhere import load_installed
from pointsman.routers.papers import base as base
from pointsman.routers.papers import compete as compete
from pointsman.routers.papers import default as default
from pointsman.routers.papers import depths as depths
from pointsman.routers.papers import dselect as dselect
from pointsman.routers.papers import dynmoe as dynmoe
from pointsman.routers.papers import expert_choice as expert_choice
from pointsman.routers.papers import expert_threshold as expert_threshold
from pointsman.routers.papers import gshard as gshard
from pointsman.routers.papers import hash as hash
from pointsman.routers.papers import hyper as hyper
from pointsman.routers.papers import loss_free as loss_free
from pointsman.routers.papers import mask as mask
from pointsman.routers.papers import noisy_topk as noisy_topk
from pointsman.routers.papers import pooled as pooled
from pointsman.routers.papers import recurrent as recurrent
from pointsman.routers.papers import relu as relu
from pointsman.routers.papers import sigma as sigma
from pointsman.routers.papers import sinkhorn as sinkhorn
from pointsman.routers.papers import smoe_dropout as smoe_dropout
from pointsman.routers.papers import soft as soft
from pointsman.routers.papers import sparsemixer as sparsemixer
from pointsman.routers.papers import stable as stable
from pointsman.routers.papers import thor as thor
from pointsman.routers.papers import top_p as top_p
from pointsman.routers.papers import topk as topk
from pointsman.routers.papers import xmoe as xmoe

load_installed()
