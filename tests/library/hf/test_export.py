"""torch.export of Hugging Face models with our experts, and with our routers."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

import pointsman.hf as hf
from tests.library.hf import zoo


@pytest.mark.filterwarnings("ignore:.*register_constant.*")
@pytest.mark.parametrize(("name", "spec"), [("mixtral", None), ("gpt_oss", None), ("mixtral", "xmoe+similarity")])
def test_an_exported_model_gives_what_the_model_gives(name: str, spec: str | None) -> None:
    model = zoo.tiny_model(name).eval()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "pointsman"
    if spec:
        hf.replace_routers(model, spec)

    def ids(tokens: int) -> dict[str, object]:
        return {"input_ids": torch.randint(32, (2, tokens)), "use_cache": False}

    shapes = {"input_ids": {1: Dim.DYNAMIC}, "use_cache": None}
    program = export(model, (), ids(8), dynamic_shapes=shapes)
    given = ids(13)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(**given).logits, model(**given).logits)
