"""Ranks that tests have started end with the last test."""

from collections.abc import Iterator

import pytest

from tests.lab.parallel.ranks import end_all


@pytest.fixture(scope="session", autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    end_all()
