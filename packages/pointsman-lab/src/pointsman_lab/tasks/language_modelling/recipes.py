"""The runs of HyperRouter (Do et al., EMNLP 2023): as its text says, and as its released scripts do.

Text: Sections 4.1, 4.2, C.1, C.2, Tables 1, 2 and A1. Scripts: github.com/giangdip2410/HyperRouter at 13a7d3c and its
history. Where the text is silent both follow the scripts: memory 512, cosine to 0, no warm-up, clipping at 0.25, Adam
(0.9, 0.999) without weight decay, post-norm, attention of width 8 x 64, evaluation of 10 sequences in segments of 128
with memory 896, a full softmax over 267,735 words on WikiText-103. Steps count batches of 22 x 512 tokens.

Known differences of ours from both: weights outside the router are drawn with a seed a parameter; validation does not
choose the checkpoint, the last one is evaluated (which one fed the tables is unstated); the WikiText-103
vocabulary is the same, and that of enwik8 with `enwik8:newlines=drop`.

A recipe takes the router, because a table's row is a router: "dense", "dense-dropout", "smoe", "smoe-dropout",
"hyperrouter", "thor"; its seed is 1111, the scripts' only one, unless another is given.
"""

from collections.abc import Callable
from typing import Any

from pointsman_lab.recipes import preset
from pointsman_lab.training.config import RunConfig

Recipe = Callable[..., RunConfig]

_DATA = {"enwik8": "enwik8:newlines=drop", "wikitext103": "wikitext-103"}
_CODE: dict[str, dict[str, Any]] = {"large": {"model.num_layers": 18, "batch_size": 44, "steps": 50_000}}

_ABOUT = {
    "enwik8-small": "Table 1, enwik8; Table A1, first row: 4 layers, 400,000 steps, k from 2 to 16. All rows with "
    "dropout 0.1, as Section C.1 says.",
    "enwik8-medium": "Table 2, medium: 8 layers, all sparse, 400,000 steps.",
    "enwik8-large": "Table 2, large: 12 layers, all sparse, 100,000 steps.",
    "wikitext103-small": "Table 1, WikiText-103; Table A1, second row: as on enwik8, on words.",
    "wikitext103-medium": "Table A1, medium on WikiText-103 (Section C.2 names it; no table shows it): 8 layers.",
    "wikitext103-large": "The large model on WikiText-103 (no table shows it): 12 layers, 100,000 steps.",
    "enwik8-small-code": "Table 1, enwik8, as the scripts run it: k from 8 to 16. Confound: the scripts of SMoE and "
    "Dense, later deleted, give no dropout (0.0), those of SMoE-Dropout, HyperRouter and Dense+Dropout 0.1. Whether "
    "they made the tables is unproven. `hyper_size` in the scripts is a dead flag.",
    "enwik8-medium-code": "Table 2, medium, as the script runs it: 8 layers of which only the first four are sparse "
    "(the others dense with inner width 512), k from 8 to 16.",
    "enwik8-large-code": "Table 2, large, as the script runs it: 18 layers, the first four sparse, 50,000 steps of 44 "
    "x 512, k from 8 to 16.",
    "wikitext103-small-code": "Table 1, WikiText-103, as the scripts run it: k from 8 to 16, dropout as on enwik8. "
    "Dense+Dropout alone trains with batches of 66 for 134,000 steps, at the same learning rate.",
    "wikitext103-medium-code": "The medium model on WikiText-103 with the scripts' settings.",
    "wikitext103-large-code": "The large model on WikiText-103 with the settings of the enwik8 script.",
}
"""CORPUS-SIZE of the text, and CORPUS-SIZE-code of the scripts -> what it is."""


def _recipe(name: str) -> Recipe:
    corpus, size, *code = name.split("-")

    def recipe(router: str = "hyperrouter", seed: int = 1111) -> RunConfig:
        config = preset(size, router=router, data=_DATA[corpus], seed=seed)
        changes: dict[str, Any] = {}
        if code:
            changes = {"train_top_k": "N/2:N", "model.moe_layers": "0,1,2,3", **_CODE.get(size, {})}
            if router in ("smoe", "dense"):  # their scripts give no --dropout; those of the other rows give 0.1
                changes["model.dropout"] = 0.0
            if name == "wikitext103-small-code" and router == "dense-dropout":
                changes |= {"batch_size": 66, "steps": 134_000}
        return config.with_overrides({**changes, "preset": f"hyperrouter-{name}"})

    recipe.__doc__ = _ABOUT[name]
    return recipe


RECIPES: dict[str, Recipe] = {f"hyperrouter-{name}": _recipe(name) for name in _ABOUT}
