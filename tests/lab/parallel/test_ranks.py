"""`Ranks` without processes."""

import pytest
import torch

from pointsman._errors import RunError
from pointsman.parallel.start import start
from pointsman.ranks import ALONE, Ranks


def test_alone_changes_nothing() -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert ALONE.whole(tensor) is tensor
    assert ALONE.part(tensor) is tensor
    assert ALONE.gather_rows(tensor) is tensor
    assert ALONE.total(tensor)[0].equal(tensor)
    ALONE.agree(object(), "anything")
    assert ALONE.rows(7) == slice(0, 7)
    assert ALONE.first


def test_rows() -> None:
    assert [Ranks(rank, 4).rows(8) for rank in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    with pytest.raises(RunError, match="4 ranks cannot share a batch of 6 rows evenly; 1, 2, 3, 6 can"):
        Ranks(0, 4).rows(6)


def test_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert start() is ALONE
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert start() is ALONE
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match="device 'tpu': several processes run on cpu or cuda"):
        start("tpu")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(RunError, match=r"RANK=3: allowed are 0 to 0 \(WORLD_SIZE=1\)"):
        start()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(RunError, match="WORLD_SIZE='two': allowed are whole numbers; torchrun sets it"):
        start()


def test_torch_distributed_is_not_imported() -> None:
    import subprocess
    import sys

    code = "import sys, pointsman; from pointsman import MoE; assert 'torch.distributed.fsdp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
