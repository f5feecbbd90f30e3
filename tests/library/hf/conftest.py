"""No hub, no progress bars; what transformers and its friends deprecate is theirs."""

import os

os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import pytest

pytest.importorskip("transformers")
FIVE = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.fixture(params=FIVE)
def five(request: pytest.FixtureRequest) -> str:
    """The model types that every feature is tested on."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
