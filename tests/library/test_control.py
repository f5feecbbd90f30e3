"""What is deprecated still answers."""

import pytest

from pointsman import MoE, pack_experts


def test_pack_experts_warns_and_does_nothing() -> None:
    with pytest.warns(DeprecationWarning, match="pack_experts does nothing any more"):
        assert pack_experts(MoE(8, 16, 4)) == 0
