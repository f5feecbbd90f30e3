"""torch.export of Hugging Face models with our experts, and with our routers; of a layer with a mixer and padding."""

import pytest
import torch
from torch.export import Dim, export

import pointsman.hf as hf
from pointsman import MoE, RoutingContext
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


def test_a_mixer_with_padding_exports_for_every_batch() -> None:
    layer = MoE(8, 8, 4, router="smoe+similarity").eval()

    class Masked(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = layer(hidden, RoutingContext(padding_mask=mask))
            return output

    def given(batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, tokens, 8), torch.rand(batch, tokens) > 0.3

    shapes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    program = export(Masked(), given(3, 5), dynamic_shapes=(shapes, shapes)).module()
    other = given(4, 7)
    with torch.no_grad():
        torch.testing.assert_close(program(*other), Masked()(*other))
