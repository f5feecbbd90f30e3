"""What is appended to a memory: equal to a concatenation, whoever appends, and never changed later."""

from itertools import pairwise

import pytest
import torch

from pointsman_lab.models.memory import appended


def grown(steps: int, width: int = 3) -> list[torch.Tensor]:
    """A memory of 4 positions, to which one position after the other is appended."""
    memory = [torch.randn(2, 4, width)]
    with torch.no_grad():
        for _ in range(steps):
            memory.append(appended(memory[-1], torch.randn(2, 1, width)))
    return memory


def test_nothing_that_was_returned_changes() -> None:
    memory = grown(60)
    kept = [one.clone() for one in memory]
    with torch.no_grad():
        for one in memory[1:]:  # branches, from every state
            new = torch.randn(2, 1, 3)
            assert torch.equal(appended(one, new), torch.cat([one, new], 1))
    assert all(map(torch.equal, memory, kept))
    assert all(torch.equal(short, long[:, : short.shape[1]]) for short, long in pairwise(memory))


def test_it_copies_seldom() -> None:
    places = [one.data_ptr() for one in grown(100)]
    assert len(set(places)) < 10


@pytest.mark.parametrize("later", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_memory_of_inference_mode_can_be_appended_to(later: type) -> None:
    memory, new = torch.randn(2, 4, 3), torch.randn(2, 1, 3)
    with torch.inference_mode():
        memory = appended(memory, new)
    with later():
        assert torch.equal(appended(memory, new), torch.cat([memory, new], 1))


def test_with_gradients_it_is_a_concatenation() -> None:
    memory = grown(3)[-1]
    new = torch.randn(2, 1, 3, requires_grad=True)
    appended(memory, new).sum().backward()
    assert torch.equal(new.grad, torch.ones_like(new))
