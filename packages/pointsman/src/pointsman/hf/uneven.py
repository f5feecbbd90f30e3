"""Mixtures of experts whose layers differ in their number of experts, which no class of transformers 5.24 builds.

`save_pretrained` puts this file beside the weights, so it imports nothing but transformers:
`from_pretrained(folder, trust_remote_code=True)` builds the model without pointsman. The configuration's
`uneven_experts` has {"fields": names of the number of experts, "layers": {MoE block: its number}}.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import transformers

AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")


def with_experts(config: Any, fields: list[str], number: int) -> Any:
    """A copy of a configuration with this number of experts in every layer."""
    copied = copy.deepcopy(config)
    for one in (copied, getattr(copied, "text_config", None)):
        for name in fields:
            if isinstance(getattr(one, name, None), int):
                setattr(one, name, number)
    return copied


@cache
def uneven(kind: Any) -> Any:
    """The class of models like `kind` that take every layer's number of experts from `config.uneven_experts`."""

    class Uneven(kind):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            both: tuple[Any, Any] = config, getattr(config, "text_config", None)
            homes = [one for one in both if hasattr(one, "pointsman")]
            routers = [one.__dict__.pop("pointsman") for one in homes]  # for the layers that stay
            super().__init__(config, *args, **kwargs)
            told = config.uneven_experts
            for number in sorted(set(told["layers"].values())):
                even = kind(with_experts(self.config, told["fields"], number), *args, **kwargs)
                for layer in (name for name, its in told["layers"].items() if its == number):
                    block = even.get_submodule(layer)
                    for path, module in block.named_modules():  # so that settings of the whole model reach it
                        if hasattr(module, "config"):
                            module.config = self.get_submodule(f"{layer}.{path}".rstrip(".")).config
                    self.set_submodule(layer, block)
            for home, kept in zip(homes, routers, strict=True):
                home.pointsman = kept
                for one in reversed([one for one in self.modules() if isinstance(one, transformers.PreTrainedModel)]):
                    one.post_init()  # type: ignore[no-untyped-call]

        @classmethod
        def is_custom_code(cls) -> bool:
            return False  # its checkpoint has the names of the class's own

    Uneven.__name__ = Uneven.__qualname__ = kind.__name__  # transformers converts some checkpoints by this name
    classes = (getattr(transformers, name) for name in AUTO)
    known = (one.__name__ for one in classes if one._model_mapping.get(kind.config_class, None) is kind)
    Uneven._auto_class = next(known, "AutoModel")
    return Uneven


def __getattr__(name: str) -> Any:
    """The class that a folder's config.json names: that of transformers, uneven."""
    if not name[0].isupper():
        raise AttributeError(name)
    return uneven(getattr(transformers, name))
