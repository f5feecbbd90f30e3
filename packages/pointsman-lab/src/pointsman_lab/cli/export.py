"""`pointsman export RUN`: a run's weights for use elsewhere."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pointsman._errors import RunError
from pointsman._files import open_folder
from pointsman_lab._files import check_writable, open_named, replacing, scratch_folder, sync_folder, within, write_whole
from pointsman_lab.cli.options import Parser, at_end, note, whole
from pointsman_lab.registry import trains
from pointsman_lab.runs.paths import CONFIG

EPILOG = """examples:
  pointsman export runs/hyper --out hyper
  pointsman export runs/hyper --materialize --out plain  # plain linear routers
  pointsman export runs/decoder --format hf --out model  # for transformers
"""


def parser() -> Parser:
    flags = Parser("export", "Write a run's weights, settings and vocabulary.", EPILOG)
    flags.add("run RUN", "a run directory", type=Path)
    told = "safetensors (default), or hf: a decoder as a model of transformers"
    flags.add("--format", told, default="safetensors", choices=("safetensors", "hf"))
    flags.add("--materialize", "generated and frozen routers as plain linear ones", action="store_true")
    flags.add("--top-k K", "experts a token, with hf (default: the last k)", type=whole(1))
    flags.common("the folder to write (default: RUN/export)", settings="")
    return flags


def run(arguments: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(arguments)
    if values.format == "hf":
        flags.without_effect(values, ("--materialize",), "with --format hf, which always does it")
        return huggingface(values)
    flags.without_effect(values, ("--top-k",), "without --format hf")
    import safetensors
    import safetensors.torch

    from pointsman.control import materialize, named_routers
    from pointsman_lab.training.run import load_run

    out = values.out or within(values.run, "export")
    refuse_runs(out, unless=("model.safetensors", "vocabulary.json"))
    saved = load_run(values.run, note=note)
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
    write_whole(out / "vocabulary.json", saved.vocabulary.to_json())
    write_whole(out / "config.json", config.to_json())  # last: without the others it would be somebody else's
    print(out)
    return 0


def refuse_runs(out: Path, *, unless: Sequence[str]) -> None:
    """Holds a command's output folder until it ends; RunError if it has other results, or cannot be written or held.

    Args:
        unless: a folder with all these files holds earlier output of the same command, which may be overwritten.
    """
    foreign = (out / "config.json").is_file() and not all((out / name).is_file() for name in unless)
    if foreign or (out / "comparison.json").is_file() or (out / "checkpoints").is_dir():
        raise RunError(f"{out} holds a run or other results, which would be overwritten; choose another --out")
    at_end.enter_context(_filling(out))


@contextmanager
def _filling(out: Path) -> Iterator[None]:
    """Holds a folder, which is made if need be: without a lock file, and no new one stays that stays empty."""
    new = [one for one in (out, *out.parents) if not os.path.lexists(one)]
    try:
        check_writable(out, keep=True)
        with open_folder(out) as folder:
            if folder is not None:
                import fcntl

                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    new.clear()
                    raise RunError(f"{out}: another process is working in this directory") from None
                except OSError:
                    pass  # some network disks know no locks
            yield
    finally:
        for one in new:
            with suppress(OSError):
                one.rmdir()


@contextmanager
def model_folder(out: Path) -> Iterator[Path]:
    """A new folder for the files of a model of transformers, which take their places in `out` at the end, or none does
    (RunError)."""
    from safetensors import SafetensorError

    existed = out.exists()
    try:
        with scratch_folder(out) as scratch:  # new, so that no link in `out` is written through
            yield scratch
            order = sorted(scratch.iterdir(), key=lambda file: (file.suffix == ".safetensors", file.name == CONFIG))
            for file in order:  # a power cut leaves no torn file in `out`
                with open_named(file) as written:
                    os.fsync(written.fileno())
            for old in out.glob("model*.safetensors*"):  # weights in other parts would be read beside the new ones
                old.unlink()
            for file in order:
                file.replace(out / file.name)  # in this order a command that was killed may be given again
            sync_folder(out)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{out}: the model was not written: {getattr(error, 'strerror', None) or error}") from None
    finally:
        if not existed:
            with suppress(OSError):  # where it holds something
                out.rmdir()


def huggingface(values: argparse.Namespace) -> int:
    """Writes a model of transformers with its tokenizer."""
    from pointsman.routers.frame.router import check_top_k
    from pointsman_lab.training.run import load_run

    out = values.out or within(values.run, "export")
    refuse_runs(out, unless=("generation_config.json", "tokenizer.json"))
    saved = load_run(values.run, note=note)
    top_k = saved.last_top_k if values.top_k is None else check_top_k(values.top_k, saved.config.model.num_experts)
    theirs = trains(saved.config.model.family).export(saved, top_k)
    from transformers.utils import logging

    from pointsman_lab.data.subwords import save_tokenizer

    theirs.generation_config.eos_token_id = theirs.config.eos_token_id = saved.vocabulary.end_id
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with model_folder(out) as scratch:
        theirs.save_pretrained(scratch)
        save_tokenizer(saved.vocabulary, scratch)
    print(f"{type(theirs).__name__}, k = {top_k}", file=sys.stderr)
    print(out)
    return 0
