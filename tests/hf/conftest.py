"""No hub, no progress bars; what transformers and its friends deprecate is theirs."""

from __future__ import annotations

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_DATASETS_OFFLINE"] = "1"

pytest.importorskip("transformers")
