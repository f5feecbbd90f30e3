import json
import math

import torch

from pointsman.routing import Routing


def routing_of(probs, k, experts=None, weights=None, unmixed=None):
    """A Routing from probabilities [tokens, E]: top-k, renormalised."""
    probs = torch.as_tensor(probs, dtype=torch.float32)
    if experts is None:
        top = probs.topk(k, -1)
        experts, weights = top.indices, top.values / top.values.sum(-1, keepdim=True)
    return Routing(experts, weights, probs, probs.clamp_min(1e-9).log(), unmixed=unmixed)


def random_routing(tokens, num_experts, k, seed=0, sharpness=1.0):
    generator = torch.Generator().manual_seed(seed)
    return routing_of((torch.randn(tokens, num_experts, generator=generator) * sharpness).softmax(-1), k)


def part(routing, rows):
    """Some tokens of a routing."""
    return Routing(routing.experts[rows], routing.weights[rows], routing.probs[rows], routing.logits[rows])


def same(one, other, tolerance=1e-9):
    """Whether two results are equal but for rounding."""
    json.dumps(one, allow_nan=False)
    json.dumps(other, allow_nan=False)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return isinstance(other, float) and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    return one == other
