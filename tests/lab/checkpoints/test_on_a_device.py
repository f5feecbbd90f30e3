"""An audit of a model on a CUDA device."""

import pytest
import torch

from pointsman_lab.checkpoints import audit
from tests.library.hf import zoo


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "dots1", "glm4_moe"])
def test_audit(name: str) -> None:
    page = audit(zoo.tiny_model(name).to("cuda"), zoo.tokenizer(), zoo.texts(40), length=32).markdown()
    assert "nan" not in page
