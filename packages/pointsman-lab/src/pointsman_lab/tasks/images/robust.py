"""Robustness of saved image classifiers, alone or a whole comparison: records beside each run's evaluation."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from pointsman._errors import RunError, did_you_mean
from pointsman.ops.kernels import using
from pointsman_lab._files import read_whole_json, within, write_whole
from pointsman_lab.cli.progress import Display, stop_on_signals
from pointsman_lab.cli.runs import write_page
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext, eval_top_k
from pointsman_lab.finetuning.run import identity
from pointsman_lab.runs.comparison import read_comparison, read_plan
from pointsman_lab.runs.paths import slug
from pointsman_lab.runs.record import RunRecord
from pointsman_lab.tasks.images.attacks import ATTACKS, under_gradient_attack
from pointsman_lab.tasks.images.image_set import ImageSet
from pointsman_lab.tasks.images.part import ImagePart, chosen_rows
from pointsman_lab.tasks.images.robust_table import TITLES, robust_tables, shifted_images, table_of
from pointsman_lab.tasks.images.severities import check_side
from pointsman_lab.tasks.images.shifts import Frame, on_hard_images, on_outliers, on_renditions, under_corruptions
from pointsman_lab.tasks.images.sources import Corrupted
from pointsman_lab.tasks.images.task import ImageClassification, open_images
from pointsman_lab.training.run import Run, load_run, runs_at

FORMAT = 1
NEED_PATH = ("a", "r", "hard")
SOME = 1000
"""How many images the slow kinds (c, pgd, fgsm) read unless told otherwise, evenly spaced."""

OUTLIERS = {"cifar10-10k": "tiny-imagenet-50"}
"""The outliers of a set of images unless a path is given."""

KNOWN_TO_CIFAR = (
    "n02002724", "n02085620", "n02106662", "n02124075", "n02423022", "n03447447", "n03670208", "n04465501",
)  # fmt: skip
"""Classes of Tiny-ImageNet that CIFAR-10 has, too (birds, dogs, cats, deer, trucks): no outliers."""


@dataclass(frozen=True)
class Asked:
    """What is asked of a run.

    Attributes:
        kind: one of `TITLES`. path: published files, a folder of images, or the reference run; None: the default.
        split: of the clean images.
        top_k: values of k; None: the largest k of the run's training.
        tokens: how many tokens of images are read at most; None: all; "run": 1,000 images of the slow kinds, else all.
    """

    kind: str
    path: str | None = None
    split: str = "test"
    top_k: tuple[int, ...] | None = None
    tokens: int | str | None = "run"

    @classmethod
    def parse(cls, text: str, **others: Any) -> Asked:
        """`KIND[:PATH]`."""
        kind, _, path = text.partition(":")
        if kind not in TITLES:
            raise RunError(f"--robust {text}: unknown kind {kind!r}: {did_you_mean(kind, TITLES)}")
        if kind in ATTACKS and path:
            raise RunError(f"--robust {text}: {kind} takes no path")
        if kind in NEED_PATH and not path:
            told = "a run directory" if kind == "hard" else "a folder of classes"
            raise RunError(f"--robust {kind}: it needs {told}: --robust {kind}:PATH")
        return cls(kind, path or None, **others)

    @property
    def folder(self) -> Path | None:
        """Where published corruptions lie: whole, so that none of the same name under POINTSMAN_DATA is read."""
        return Path(os.path.abspath(os.path.expanduser(self.path))) if self.path else None

    @property
    def file(self) -> str:
        """Name of the record in the run directory: of a path its last part, of a run's the last two."""
        parts = Path(os.path.abspath(self.path)).parts[-2 if self.kind == "hard" else -1 :] if self.path else ()
        where = "".join(f"-{slug(part)}" for part in parts)
        split = "" if self.split == "test" else f"-{self.split}"
        return f"robust-{self.kind}{where}{split}.json"


def robustness(
    run: Run, asked: Asked, *, how: EvaluationContext = PLAIN, keep: dict[str, str] | None = None
) -> dict[str, Any]:
    """The record of one run: what `shifts` and `attacks` give, with "kind", "checkpoint" and so on."""
    config = run.config
    if config.model.reads_tokens:
        raise RunError(f"{run.path} learned text: --robust is for runs on images, --attack for text")
    images = cast(ImageClassification, run.task()).images
    clean = images.split(asked.split)
    top_k = asked.top_k or (config.top_k_schedule.high,)
    frame = Frame(config.eval_batch_size, top_k, replace(how, precision=run.autocast()), keep)
    rows = chosen_rows(clean, _budget(asked, run))
    protocol = {"data": images.description, "split": asked.split, "images": len(rows), "top_k": list(top_k)}
    with using(run.config.kernels):
        if asked.kind == "c":
            if asked.path is None:
                check_side(images.side)
            source = Corrupted(images, asked.split, rows, asked.folder)
            protocol["corruptions"] = source.description
            k = config.top_k_schedule.high
            found = under_corruptions(run.model, source.clean, source, routing_k=k, frame=frame)
            found["imagenet_c"] = bool(asked.path) and len(images.classes) == 1000
        elif asked.kind in ATTACKS:
            found = {"results": [
                under_gradient_attack(run.model, clean.take(rows), asked.kind, top_k=k, frame=frame)
                for k in eval_top_k(run.model, top_k)
            ]}  # fmt: skip
        else:
            found = _shifted(run, asked, images, clean.take(rows), frame)
    return {"format": FORMAT, "kind": asked.kind, "checkpoint": f"step-{run.step}", "protocol": protocol, **found}


def _shifted(run: Run, asked: Asked, images: ImageSet, clean: ImagePart, frame: Frame) -> dict[str, Any]:
    """Kinds a, r, o and hard."""
    if asked.kind == "hard":
        reference = load_run(str(asked.path), device=str(next(run.model.parameters()).device))
        if reference.config.data != run.config.data or reference.vocabulary != run.vocabulary:
            raise RunError(f"{asked.path} learned other images or classes ({reference.config.data}) than {run.path}")
        k = reference.config.top_k_schedule.high
        return on_hard_images(run.model, clean, reference.model, reference_k=k, frame=frame)
    shifted = _others(run, asked, images)
    if asked.kind in ("a", "r"):
        whole = shifted.relabelled(images.classes).split("test")
        part, inside = whole.take(chosen_rows(whole, _budget(asked, run))), sorted(set(whole.labels.tolist()))
        _check_several(asked, inside)
        found = on_renditions(run.model, clean, part, inside, frame)
        return {**found, "shifted_data": shifted.description}
    outliers, classes = shifted.split("test"), None
    share = len(clean) / len(images.split(asked.split))  # as many of the outliers: the base rate stays
    known = [images.classes.index(name) for name in shifted.classes if name in images.classes]
    if len(known) == len(shifted.classes):  # ImageNet-O: folders of the classes that its images are mistaken for
        classes = sorted(known)
        _check_several(asked, classes)
        clean = clean.take(np.flatnonzero(np.isin(clean.labels, classes)))
    elif known:
        told = ", ".join(images.classes[label] for label in known)
        raise RunError(
            f"--robust o:{asked.path}: the model learned some of its classes ({told}); allowed are sets with none of "
            "them, or whose folders all have names of them (ImageNet-O)"
        )
    elif shifted.name == OUTLIERS.get(run.config.data):
        strange = [label for label, name in enumerate(shifted.classes) if name not in KNOWN_TO_CIFAR]
        outliers = outliers.take(np.flatnonzero(np.isin(outliers.labels, strange)))
    outliers = outliers.take(chosen_rows(outliers, max(1, round(share * len(outliers)))))
    found = on_outliers(run.model, clean, outliers, classes, frame)
    return {**found, "outlier_data": shifted.description}


def _check_several(asked: Asked, classes: Sequence[int]) -> None:
    if len(classes) < 2:
        told = "one class, and logits are restricted to its classes, so that all would be right"
        raise RunError(f"--robust {asked.kind}:{asked.path}: {told}; at least two are needed")


def _others(run: Run, asked: Asked, images: ImageSet) -> ImageSet:
    """The images of kinds a, r and o."""
    path = asked.path or OUTLIERS.get(run.config.data)
    if path is None:
        raise RunError(f"--robust o: no outliers are known for {run.config.data}: --robust o:PATH")
    found = open_images(path if ":size=" in path else f"{path}:size={images.side}")
    if found.side != images.side:
        told = f"its images have {found.side} pixels a side, and the model reads {images.side}; leave :size= out"
        raise RunError(f"--robust {asked.kind}:{path}: {told}")
    return found


def _fingerprints(run: Run, asked: Asked) -> dict[str, str]:
    """Hashes of what a record is made from: the run's weights, its images, and what PATH names."""
    if run.config.model.reads_tokens:
        return {}  # `robustness` refuses it
    images = cast(ImageClassification, run.task()).images
    found = {"weights": identity(run)["sha256"], "images": images.fingerprint}
    if asked.kind == "hard":
        found["path"] = identity(load_run(str(asked.path)))["sha256"]
    elif asked.kind in ("a", "r", "o"):
        found["path"] = _others(run, asked, images).fingerprint
    elif root := asked.folder:  # published files may be too many to read: down to the folders of classes
        named = (place for pattern in ("*", "*/*", "*/*/*") for place in sorted(root.glob(pattern)))
        places = [place for place in named if place.exists()]  # no broken link
        about = [(str(place.relative_to(root)), (told := place.stat()).st_size, told.st_mtime_ns) for place in places]
        found["path"] = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    return found


def _budget(asked: Asked, run: Run) -> int | None:
    if isinstance(asked.tokens, int):
        return max(1, asked.tokens // int(run.model.config.tokens))
    return SOME if asked.tokens == "run" and asked.kind in ("c", *ATTACKS) else None


def save_robustness(
    run: Run, asked: Asked, *, out: Path | None = None, how: EvaluationContext = PLAIN, predictions: bool = False
) -> tuple[dict[str, Any], Path]:
    """`robustness`, written into `out` or the run directory, unless the same is there; the record and its file.

    The same: asked in the same words, of the same weights and images, with a PATH that holds what it held. With
    `predictions` it is made anew, and predictions/robust-KIND/SET-kK.csv have each image's class, prediction and
    confidence.
    """
    if predictions and asked.kind in ATTACKS:
        raise RunError(f"--predictions official: no official scorer reads predictions under {asked.kind}; leave it out")
    file = (out or run.path) / asked.file
    keep: dict[str, str] | None = {} if predictions else None
    words = {"path": asked.path, "split": asked.split, "top_k": list(asked.top_k or ()), "tokens": asked.tokens}
    wanted = {**words, "checkpoint": f"step-{run.step}", "from": _fingerprints(run, asked)}
    before = read_whole_json(file)
    if before is not None and before.get("asked") == wanted and not predictions:
        return before, file
    record = {**robustness(run, asked, how=how, keep=keep), "asked": wanted}
    for name, content in (keep or {}).items():
        write_whole(within(file.parent, "predictions", file.stem, name), content)
    write_whole(file, json.dumps(record, indent=2) + "\n")
    return record, file


def evaluate_shifted(values: argparse.Namespace, device: str) -> int:
    """`pointsman evaluate … --robust`: a run, or every run of a comparison, on shifted images; prints and saves.

    In a comparison the records that are there stay.
    """
    if values.set or values.attack:
        raise RunError("pointsman evaluate: --robust goes with neither --set nor --attack")
    if values.data:
        raise RunError("--data has no effect on --robust: the images are those of the run; --robust KIND:PATH")
    tokens = "run" if values.eval_tokens is None else None if values.eval_tokens == "all" else values.eval_tokens
    asked = Asked.parse(values.robust, split=values.split or "test", top_k=values.top_k, tokens=tokens)
    single, predictions = read_plan(values.run) is None, bool(values.predictions)
    with Display() as display, stop_on_signals() as stop:
        how = EvaluationContext(progress=display, stop=stop)
        for run in runs_at(values.run, device, display.note):
            out = values.out if single else None
            _, file = save_robustness(run, asked, out=out, how=how, predictions=predictions)
    if single:
        read = RunRecord(file.parent, run.config.model.router, run.config.seed, {})
        print(table_of([read.router], file.stem, {(read.router, read.seed): shifted_images(read, file.stem)}).text())
        print(f"saved: {file}", file=sys.stderr)
        return 0
    for table in robust_tables(read_comparison(values.run)):
        if table.name == Path(asked.file).stem:
            table.write(values.out or values.run)
            print(table.text())
    print(f"\n{write_page(values.run)}", file=sys.stderr)
    return 0
