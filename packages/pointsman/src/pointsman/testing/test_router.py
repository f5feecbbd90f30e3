"""The contract as tests: `pytest --pyargs pointsman.testing --pointsman-router SPEC`."""

import pytest

from pointsman.routers.frame.elsewhere import import_routers
from pointsman.testing.case import Case
from pointsman.testing.contract import CHECKS, Check, check_spec, hold


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    specs = metafunc.config.getoption("--pointsman-router")
    if not specs:
        raise pytest.UsageError("pointsman.testing: name the router to test, as in --pointsman-router smoe")
    try:
        for name in metafunc.config.getoption("--pointsman-import"):
            import_routers(name)
        for spec in specs:
            check_spec(spec)
    except ValueError as mistake:
        raise pytest.UsageError(str(mistake).replace("--import", "--pointsman-import")) from None
    metafunc.parametrize("spec", specs)
    metafunc.parametrize("check", CHECKS, ids=lambda check: check.__name__)


def test_contract(spec: str, check: Check) -> None:
    hold(Case(spec), [check])
