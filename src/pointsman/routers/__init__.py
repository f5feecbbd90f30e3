"""Routers, one file a paper. Adding one = one new file and one import line here. Installed packages add theirs."""

from pointsman.routers import base as base
from pointsman.routers import compete as compete
from pointsman.routers import default as default
from pointsman.routers import depths as depths
from pointsman.routers import dselect as dselect
from pointsman.routers import dynmoe as dynmoe
from pointsman.routers import expert_choice as expert_choice
from pointsman.routers import expert_threshold as expert_threshold
from pointsman.routers import forced as forced
from pointsman.routers import gshard as gshard
from pointsman.routers import hash as hash
from pointsman.routers import hyper as hyper
from pointsman.routers import loss_free as loss_free
from pointsman.routers import mask as mask
from pointsman.routers import mutual as mutual
from pointsman.routers import noisy_topk as noisy_topk
from pointsman.routers import recurrent as recurrent
from pointsman.routers import relu as relu
from pointsman.routers import sigma as sigma
from pointsman.routers import sinkhorn as sinkhorn
from pointsman.routers import smoe_dropout as smoe_dropout
from pointsman.routers import soft as soft
from pointsman.routers import sparsemixer as sparsemixer
from pointsman.routers import stable as stable
from pointsman.routers import thor as thor
from pointsman.routers import top_p as top_p
from pointsman.routers import topk as topk
from pointsman.routers import vmoe as vmoe
from pointsman.routers import xmoe as xmoe
from pointsman.routers.elsewhere import load_installed

load_installed()
