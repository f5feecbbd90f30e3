"""Shared by all tests: one thread of arithmetic, a fixed seed, and a home of its own for caches."""

import os
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported; looking for the hub takes 20 s
torch.set_num_threads(1)  # one process a core runs the tests
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():  # torch.manual_seed keeps a printed stack for each of them: 1 ms a call
        device.manual_seed_all = lambda seed: None  # type: ignore[union-attr]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-specs", action="store_true", help="what runs weekly: every spec, layout and fault")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-specs"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("weekly")])
        items[:] = [item for item in items if not item.get_closest_marker("weekly")]


@pytest.fixture(autouse=True)
def _fresh(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def data_dir() -> Path:
    """The folder of real data sets; tests that need it are skipped without it."""
    folder = os.environ.get("POINTSMAN_DATA")
    if not folder:
        pytest.skip("POINTSMAN_DATA is not set")
    return Path(folder)
