"""`pointsman export RUN`: a run's weights for use elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pointsman._errors import RunError
from pointsman.cli.options import Parser, check_device, refuse_runs

EPILOG = """examples:
  pointsman export runs/hyper --out hyper
  pointsman export runs/hyper --out plain --materialize      # HyperRouter becomes a plain linear router
"""


def parser() -> Parser:
    flags = Parser("export", "Write a run's weights, settings and vocabulary.", EPILOG)
    flags.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    flags.add_argument("--format", default="safetensors", choices=("safetensors",), help="default: safetensors")
    flags.add_argument("--materialize", action="store_true", help="generated and frozen routers as plain linear ones")
    flags.common("the folder to write (default: RUN/export)", settings="")
    return flags


def run(arguments: Sequence[str]) -> int:
    values = parser().read(arguments)
    check_device(values.device)
    import safetensors
    import safetensors.torch

    from pointsman._files import replacing, within, write_whole
    from pointsman.control import materialize, named_routers
    from pointsman.lab.training.run import load_run

    out = values.out or within(values.run, "export")
    refuse_runs(out, unless=("model.safetensors", "vocabulary.json"))
    saved = load_run(values.run, note=lambda message: print(message, file=sys.stderr))
    config = saved.config
    if values.materialize:
        materialize(saved.model)
        specs = "|".join(router.spec for _, router in named_routers(saved.model))
        config = config.with_overrides({"model.router": specs})
    with replacing(out / "model.safetensors") as aside:
        try:
            metadata = {"format": "pt", "step": str(saved.step)}
            safetensors.torch.save_model(saved.model, str(aside), metadata=metadata)
        except safetensors.SafetensorError as error:
            raise RunError(f"{out}: the weights were not written: {error}") from None
    write_whole(out / "config.json", config.to_json())
    write_whole(out / "vocabulary.json", saved.vocabulary.to_json())
    print(out)
    return 0
