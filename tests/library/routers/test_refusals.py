"""What no router accepts: each mistake in a spec is one line that says where and what is allowed."""

import re

import pytest

from pointsman import build_router

RANGES = """
    base:group=world compete:rate=2 compete:warmup=-1 compete:router=-1 compete:diversity=-1
    default:decay=1 default:decay=-0.1
    depths:share=0 depths:share=1.5 depths:auxiliary=-1
    dselect:selectors=0 dselect:gamma=0 dselect:entropy=-1 dselect:codes=-1
    dynmoe:auxiliary=-1
    expert-threshold:decay=1 expert-threshold:bins=1
    gshard:second=sometimes
    hyperrouter:l2=-1 hyperrouter:embed_dropout=1 hyperrouter:init=chang hyperrouter:generate=row
    hyperrouter:hyper_dim=0 hyperrouter:hyper_dim=2.5
    loss-free:groups=5 loss-free:groups=0 loss-free:groups=2:kept=3 loss-free:rate=-1 loss-free:bins=-1
    loss-free:gate=tanh loss-free:real=3:update=share:nulls=2
    mask:visible=0 mask:visible=7 mask:rare=-1
    noisy-topk:importance=-1 noisy-topk:load=-1 noisy-topk:epsilon=-1
    sigma:dropout=1 sigma:dropout=-0.1 sigma:entropy=-1
    sinkhorn:temperature=0 sinkhorn:iterations=0
    smoe:noise=-1 smoe:nulls=-1 smoe:nulls=100000000 smoe:nulls=2:kind=twin smoe:gate=tanh smoe:bias=maybe
    smoe:balance=lots smoe:balance=nan smoe:scale=0
    smoe:capacity=0 smoe:capacity=-1 smoe:capacity=1e30 smoe:capacity=nan
    sparsemixer:r=-1 sparsemixer:r=nan sparsemixer:version=3
    stable:stage_one=-1 stable:load=-1 stable:distill=-1 stable:light=trigram
    switch:jitter=5 thor:alpha=-2
    top-p:tau=0 top-p:tau=1.5 top-p:dynamic=-1
    vmoe:noise=-1 vmoe:importance=-1 vmoe:load=-1
    xmoe:routing_dim=0 xmoe:tau0=0 xmoe:expert_norm=-1 xmoe:gate=softmaks xmoe-torchscale:expert_norm=0
    xmoe:routing_dim=1 xmoe-torchscale:routing_dim=1
"""
"""Values that are not allowed. The line names the last option but where another one is the mistake."""
OTHERS = {"loss-free:real=3:update=share:nulls=2": "real"}

EFFECTS = """
    soft:scale=2 soft:weigh=input soft:balance=0.1 soft+similarity soft+uniform hash+similarity thor+similarity
    expert-choice:balance=0.1 smoe:balance_on=scores smoe:balance_scope=step smoe:balance=0.1:balance_on=scores
    thor:balance=0.1 thor:z_loss=0.1 thor:lr_scale=2 smoe-dropout:lr_scale=2 smoe:kind=copy loss-free:kind=copy
    smoe:capacity_order=rank pooled+similarity thor:dense_gradient=true soft:dense_gradient=true
    sparsemixer:dense_gradient=true default:dense_gradient=true smoe:weigh=input:dense_gradient=true
    smoe:nulls=2:dense_gradient=true dynmoe:dense_gradient=true
    smoe:capacity=3:capacity_unit=tokens:capacity_multiple=4
    smoe:capacity=3:capacity_unit=tokens:capacity_rounding=round
    depths:capacity=0.5:capacity_total=one default:capacity=0.5:capacity_total=one default:weigh=input
    loss-free:update=quantile:rate=5 loss-free:update=none:rate=5 loss-free:update=none:centre=true loss-free:bins=7
    loss-free:group_score=max top-p:balance=0:counted=first
"""
"""What would change nothing, or mean nothing."""

MISTAKES = {
    "": "a router spec must be a name",
    "smo": "did you mean 'smoe'",
    "hyperouter": "did you mean 'hyperrouter'",
    "smoe:gatee=softmax": "did you mean 'gate'",
    "smoe:gate": "is not option=value",
    "smoe:gate=softmax:gate=sigmoid": "given twice",
    "smoe+similarty": "unknown mixer",
    "smoe+similarity+attention": "at most one mixer",
    "dense:bias=false": "takes no options",
    "dense": "baseline without a router",
    "thor:renormalize=false": "thor has its own rule for renormalize; leave the option out",
    "dynmoe:renormalize=true": "dynmoe has its own rule for renormalize; leave the option out",
    "dynmoe:renormalize=false": "dynmoe has its own rule for renormalize; leave the option out",
    "default:renormalize=true": "default has its own rule for renormalize; leave the option out",
    "expert-choice:capacity=1": "expert-choice has its own rule for capacity",
    "expert-choice:eval_capacity=1": "expert-choice has its own rule for eval_capacity",
    "soft:eval_capacity=0.5": "soft has its own rule for eval_capacity",
    "loss-free:nulls=2:kind=mixed": "loss-free: option nulls=2: kind=mixed allows whole numbers from 3",
    "loss-free:nulls=2:groups=2": "loss-free: option groups=2: nulls=2 allows 1",
    "loss-free:groups=2:update=quantile": "groups=2: update=quantile allows 1",
    "loss-free:biased=logits:update=quantile": "biased=logits: update=quantile allows scores",
    "loss-free:update=share:nulls=2": "update=share needs real",
    "loss-free:real=1:nulls=2": "real needs it",
    "loss-free:real=1:update=share": "need nulls",
    "loss-free:null_bias=-1": "need nulls",
    "relu@loss-free": "'loss-free' needs scores above 0 .*'relu' gives relu",
    "smoe:gate=sigmoid@top-p": "'top-p' needs probabilities that sum to 1",
    "top-p:gate=sigmoid": "'top-p' needs probabilities that sum to 1",
    "xmoe@thor": "'thor' needs no scores at all",
    "thor@smoe": "'smoe' needs scores above 0 .*'thor' gives no scores at all",
    "xmoe@soft": "'soft' needs the softmax of its logits, without a temperature",
    "smoe:rate=0.1@loss-free": "'rate' is an option of the choice: write it after '@'",
    "smoe:balance=0.1@loss-free": "'balance' is an option of the choice",
    "xmoe@loss-free:routing_dim=4": "'routing_dim' is an option of the scores: write it before '@'",
    "xmoe@loss-fre": "did you mean 'loss-free'",
    "smoe@attentoin": "unknown router 'attentoin': allowed: base, compete, default, depths",
    "xmoe@loss-free:ratee=1": "did you mean 'rate'",
    "smoe@xmoe@base": "at most one choice",
    "smoe+similarity@loss-free": "the mixer comes last",
    "similarity@smoe": "'similarity' is a mixer",
    "dense@smoe": "has no router and takes no options",
    "smoe@similarity": "'similarity' is a mixer; put it behind",
    "smoe+loss-free": "'loss-free' is a router; what follows",
    "smoe@dense": "'dense' has no router",
    "smoe@": "a name is missing",
    "@smoe": "a name is missing",
    "smoe+": "a name is missing",
}


def told(spec: str, vocab_size: int | None = 64) -> str:
    """The refusal, which is one line."""
    with pytest.raises(ValueError, match=r".+") as error:
        build_router(spec, dim=8, num_experts=6, vocab_size=vocab_size)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("spec", RANGES.split())
def test_a_value_that_is_not_allowed_is_named_with_what_is(spec: str) -> None:
    option = OTHERS.get(spec, spec.rpartition(":")[2].partition("=")[0])
    assert re.search(rf"{spec.partition(':')[0]}.*: option {option}=.*allowed (is|are) ", told(spec))


@pytest.mark.parametrize("spec", EFFECTS.split())
def test_what_would_change_nothing_is_refused(spec: str) -> None:
    line = told(spec)
    assert spec.partition("+")[0].partition(":")[0] in line
    assert "dense_gradient" in line or "dense_gradient" not in spec


@pytest.mark.parametrize("spec", MISTAKES)
def test_mistakes_are_named(spec: str) -> None:
    assert re.search(MISTAKES[spec], told(spec))


@pytest.mark.parametrize("name", ["stable", "hash", "mask"])
def test_routers_of_token_ids_need_the_size_of_the_vocabulary(name: str) -> None:
    assert f"{name}: the router routes by token ids and needs vocab_size" in told(name, None)
