"""Tasks by name: those of this package, and those of other packages by entry points of the group `pointsman.tasks`.

A task's entry says what it gives to the rest of the laboratory. Nothing outside a task's folder imports it: the other
rooms ask the entries, whose methods import what they need when they are called.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module, metadata
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import parse_json

GROUP = "pointsman.tasks"
BUILT_IN = (
    "language_modelling", "masked_language_modelling", "translation", "images", "attacks", "crosslingual",
    "classification",
)  # fmt: skip
OLDEST = "transformer-xl"
"""The family of runs whose config.json names none."""

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """A setting of a run that only some tasks have.

    Attributes:
        default: says the type, too.
        meaning: in words.
        least, most: of a number.
        trains: whether it changes the training.
    """

    default: Any
    meaning: str
    least: float = 0
    most: float | None = None
    trains: bool = True


class TaskEntry:
    """What a task gives to the rest of the laboratory; a module's name for it is `TASK`.

    Attributes:
        name: of the task.
        families: families of models that `train` trains on this task.
        configs, task, tuning, reader, starter, tabler: what `config` (one for each family), `open`, `fine_tuning`,
            `vocabulary`, `start` and `tables` ask, as MODULE:NAME; a task may have the methods instead.
        takes: other families whose models learn it, from the weights of a run.
        levels: of vocabularies ("level" in vocabulary.json) that `vocabulary` reads.
        presets: preset -> settings of a run; those of its model under "model"; besides "family", "router" (the
            published one) and "vocabulary" (the published number of tokens).
        settings: name -> setting that runs of all these families have.
        unread: settings of every run that nothing reads in runs of these families.
        learns: names that `finetune --task` takes: of what `learned` names as MODULE:NAME, a mapping.
        learns_files: whether it also learns what a file or folder holds.
        together: of `learns`, those that published tables show in one row.
        epilogs: command -> what its help says at its end of this task: examples, in lines of at most 80 columns.
    """

    name = ""
    families: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()
    task = tuning = reader = starter = tabler = learned = ""
    takes: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    presets: Mapping[str, Values] = MappingProxyType({})
    settings: Mapping[str, Setting] = MappingProxyType({})
    unread: frozenset[str] = frozenset()
    learns_files = False
    together: tuple[str, ...] = ()
    epilogs: Mapping[str, str] = MappingProxyType({})

    @property
    def learns(self) -> Sequence[str]:
        return tuple(resolve_name(self.learned)) if self.learned else ()

    def config(self, family: str) -> Any:
        """The class of a family's settings, a `ModelConfig`."""
        return resolve_name(self.configs[self.families.index(family)])

    def open(self, config: Any, progress: Any = None, vocabulary: Any = None) -> Any:
        """The `Task` of these settings, with its data; see `training.task.pretraining_task`."""
        return resolve_name(self.task).open(config, progress, vocabulary)

    def fine_tuning(self) -> Any:
        """The class of what `learns` names, a `finetuning.task.FineTuning`."""
        return resolve_name(self.tuning)

    def vocabulary(self, text: str) -> Any:
        """What vocabulary.json holds. ValueError: it is damaged."""
        return resolve_name(self.reader)(text)

    def sentences(self, spec: str) -> Any:
        """The sentences by language (`data.pieces.MultilingualText`) of data; None: this task does not know them."""

    def recipes(self) -> Mapping[str, Any]:
        """Recipe -> function of router and seed that returns a paper's settings (`RunConfig`)."""
        return {}

    def epilog(self, command: str) -> str:
        """What the help of a command says at its end of this task."""
        return self.epilogs.get(command, "")

    def add_flags(self, command: str, flags: Any) -> None:
        """Adds this task's flags to a command's `cli.options.Parser`."""

    def run(self, command: str, flags: Any, values: Any, device: str) -> int | None:
        """Runs a command whose flags, or whose run, are this task's; None: they are not.

        Args:
            flags: the command's parser. values: what it read.
        """

    def start(self, config: Any, folder: str, router: str | None) -> Any:
        """The settings of a run that starts from the weights in a folder of transformers, with this router."""
        if self.starter:
            return resolve_name(self.starter)(config, folder, router)
        raise RunError(f"--from {folder}: models of the family {config.model.family!r} start from no folder")

    def export(self, run: Any, top_k: int) -> Any:
        """A run's model (`training.run.Run`) as a model of transformers with this k."""
        raise RunError(f"{run.path}: no class of transformers is a model of the family {run.config.model.family!r}")

    def published(self, run: Any, column: Any, top_k: int | None) -> float | None:
        """A run's figure at this k for a column of published tables (`report.published.Column`) with a `shift`."""

    def data_of(self, run: Any) -> str:
        """What the settings in a paper's tables say of a run's data; "": nothing."""
        return ""

    def tables(self, comparison: Any) -> Sequence[Any]:
        """Tables of what this task has recorded beside a comparison's runs (`report.forms.Forms`), for pages."""
        return resolve_name(self.tabler)(comparison) if self.tabler else ()


def entries() -> Iterator[TaskEntry]:
    """All tasks; each is imported when the iteration comes to it."""
    for name in BUILT_IN:
        yield import_module(f"pointsman_lab.tasks.{name}").TASK
    yield from _installed()


@cache
def _installed() -> tuple[TaskEntry, ...]:
    """Tasks of other packages; warns of one that fails: somebody else's package must not take ours down."""
    found = []
    for point in metadata.entry_points(group=GROUP):
        try:
            if not isinstance(task := point.load(), TaskEntry):
                raise TypeError(f"{point.value} is no TaskEntry")
            found.append(task)
        except Exception as error:
            package, told = point.dist.name if point.dist else "?", str(error) or type(error).__name__
            warnings.warn(f"the task {point.name!r} of the package {package!r} is missing: {told}", stacklevel=2)
    return tuple(found)


def trains(family: str) -> TaskEntry:
    """The task that `train` trains models of this family on."""
    for entry in entries():
        if family in entry.families:
            return entry
    raise RunError(f"unknown model family {family!r}: {did_you_mean(str(family), families())}")


def learner(spec: str) -> TaskEntry:
    """The task that `finetune --task` names: by its name, else the one that learns what files hold."""
    every = list(entries())
    named = [entry for entry in every if spec.partition(":")[0] in entry.learns]
    return (named or [entry for entry in every if entry.learns_files])[0]


def sentences(spec: str) -> Any:
    """The sentences by language of data such as "xtreme-text", as `TaskEntry.sentences` has them."""
    found = next((text for entry in entries() if (text := entry.sentences(spec)) is not None), None)
    if found is None:
        raise RunError(f"data {spec!r}: no task has sentences by language of it")
    return found


def families() -> tuple[str, ...]:
    """All families of models."""
    return tuple(name for entry in entries() for name in entry.families)


def family(name: str) -> Any:
    """The settings of a family of models, a class of `ModelConfig`. Errors as of `trains`."""
    return trains(name).config(name)


def own_settings(family: str) -> dict[str, Setting]:
    """The settings that only runs of this family have."""
    return {
        name: one
        for entry in entries()
        if family in (*entry.families, *entry.takes)
        for name, one in entry.settings.items()
    }


def presets() -> dict[str, Values]:
    """All presets, as `TaskEntry.presets` describes them."""
    return {name: values for entry in entries() for name, values in entry.presets.items()}


def find_preset(name: str) -> Values:
    """A preset's settings."""
    for entry in entries():
        if name in entry.presets:
            return entry.presets[name]
    raise RunError(f"unknown preset {name!r}: {did_you_mean(name, presets())}")


def preset_config(preset: str, vocab_size: int, **changes: Any) -> Any:
    """The settings of a preset's model, with changes by field name: a `ModelConfig` of the preset's family.

    `vocab_size` is for families that read tokens.
    """
    values = find_preset(preset)
    config = family(values.get("family", OLDEST))
    known = {field.name for field in fields(config)}
    for name in changes:
        if name not in known:
            raise RunError(f"unknown model setting {name!r}: {did_you_mean(name, known)}")
    size = {"vocab_size": vocab_size} if config.reads_tokens else {}
    return config(**{**values["model"], **size, **changes})


def read_vocabulary(text: str) -> Any:
    """What a vocabulary's `to_json` wrote."""
    try:
        level = parse_json(text)["level"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"not a vocabulary: {error}") from None
    for entry in entries():
        if level in entry.levels:
            return entry.vocabulary(text)
    known = [one for entry in entries() for one in entry.levels]
    raise RunError(f"not a vocabulary: no task reads those of level {level!r}: {did_you_mean(str(level), known)}")
