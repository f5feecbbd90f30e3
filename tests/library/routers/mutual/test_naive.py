"""The mixers equal the few lines that are read first, forward and gradient."""

import pytest
import torch

from pointsman.routers.mutual.naive import attention_inform, similarity_inform
from tests.library.routers.mutual.test_mixers import Case, assert_same, mixer


@pytest.mark.parametrize("causal", [False, True])
def test_similarity(causal: bool) -> None:
    case = Case(causal, memory=False, padded=False)
    got, _, _ = mixer("similarity:source=input:tau=2.5")(case.probs, case.hidden, case.context)
    assert_same(got, similarity_inform(case.probs, case.hidden, 2.5, causal=causal), [case.probs, case.hidden])


@pytest.mark.parametrize("head", [1, None])
@pytest.mark.parametrize(("causal", "bias"), [(False, "none"), (True, "none"), (True, "relative")])
def test_attention(head: int | None, causal: bool, bias: str) -> None:
    case = Case(causal, memory=False, padded=False, bias=bias)
    mix = mixer(f"attention:sigma=1.3:heads={'all' if head is None else 'lowest-entropy'}")
    if head is not None:
        mix.head_entropy = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    got, _, _ = mix(case.probs, case.hidden, case.context)
    leaves = [case.probs, case.query, case.key, case.value, case.out_weight, case.heads_out, *case.relative]
    assert_same(got, attention_inform(case.probs, case.trace, 1.3, head, causal=causal), leaves)
