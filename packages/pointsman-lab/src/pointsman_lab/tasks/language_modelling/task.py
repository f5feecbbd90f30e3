"""Language modelling: predicting the next token of a corpus, judged by bits per character or perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman.ranks import ALONE, Ranks
from pointsman_lab._values import finite, perplexity
from pointsman_lab.data.catalog import Level
from pointsman_lab.data.corpus import Corpus, open_corpus
from pointsman_lab.data.download import DataProgress
from pointsman_lab.data.streams import IGNORE, BatchStream, EvalStream
from pointsman_lab.data.subwords import has_tokenizer
from pointsman_lab.data.vocabulary import IdArray, Vocabulary
from pointsman_lab.evaluation.diagnose import Batch, Reader
from pointsman_lab.evaluation.passes import PLAIN, EvaluationContext, Pass, divides_rows, evaluated
from pointsman_lab.models.config import build_model
from pointsman_lab.models.decoder import Decoder, DecoderConfig
from pointsman_lab.models.huggingface.convert import difference, load_theirs
from pointsman_lab.models.huggingface.reading import open_config, read_config
from pointsman_lab.models.memory import Memory
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.registry import own_settings
from pointsman_lab.tasks.language_modelling import TASK
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.k_schedule import doublings
from pointsman_lab.training.kernels import autocast
from pointsman_lab.training.objectives import Objective, objective_of
from pointsman_lab.training.run import Run
from pointsman_lab.training.task import Batches, Observed, Task


@dataclass(frozen=True)
class EvalProtocol:
    """How a model is evaluated; two figures with different protocols do not compare.

    Attributes:
        batch_size: rows of text read side by side.
        segment_length: tokens a segment.
        memory_length: tokens of memory before it, so that a token sees up to segment + memory.
        tokens: how many targets at most, whole segments evenly spaced; None = all.
        seed: of routers that draw at random in evaluation.
    """

    batch_size: int
    segment_length: int
    memory_length: int
    tokens: int | None = None
    seed: int = 0


def quality(level: Level, nats: float) -> tuple[str, float | None]:
    """Name and value of the figure that a level is judged by: bits per character nats / ln 2, or perplexity e^nats.

    At byte level a character is a byte, as everywhere in the enwik8 literature; of words and subwords it is the
    perplexity of a token, which compares between runs with the same vocabulary. None if it is no finite number.
    """
    if level in ("word", "subword"):
        return "perplexity", perplexity(nats)
    return "bits_per_character", finite(nats / math.log(2))


@torch.no_grad()
def evaluate(
    model: TransformerXL,
    tokens: IdArray | tuple[IdArray, ...],
    level: Level,
    *,
    split: str,
    top_k: Sequence[int],
    protocol: EvalProtocol,
    how: EvaluationContext = PLAIN,
) -> list[dict[str, Any]]:
    """Evaluates a model at every k of `top_k`, one pass over the text each.

    The text is read as `EvalStream` cuts it, with a memory that starts empty at the head of each row. Random routers
    draw from a generator state of their own (`protocol.seed`).

    Args:
        tokens: ids [n] of the part (`corpus.split(split)`), in the model's vocabulary; or rows of ids, read side by
            side, of which all is read.
        level: what a token is; decides between bits per character and perplexity.
        split, top_k, how: as of `passes.evaluated`, also for errors. The ranks share the rows. Where a row's figures
            depend on what is read beside it, or on draws, every rank reads all rows.

    Returns:
        For each k: {"split", "top_k", "nats", "metric", "value", "tokens",
        "routers": {layer: {"entropy", "entropy_std", "load"}}}. Entropies are of the full distribution before mixing,
        means and deviations over tokens in nats; with a mixer "mixed_entropy" is that of what selection saw. `load` [E]
        is each expert's share of the assignments.
    """
    device = next(model.parameters()).device
    if isinstance(tokens, tuple):
        stream = EvalStream.of_rows(tokens, protocol.segment_length, device)
    else:
        stream = EvalStream(tokens, protocol.batch_size, protocol.segment_length, device, protocol.tokens)
    ranks = how.ranks if divides_rows(model) else ALONE

    whole = stream.rows % ranks.count == 0  # otherwise some ranks have rows of padding

    def one_pass(one: Pass) -> dict[str, Any]:
        total = torch.zeros((), dtype=torch.float64, device=device)  # nothing waits for it before the last segment
        read = torch.zeros((), dtype=torch.int64, device=device)
        memory: Memory | None = None
        for index, (inputs, targets) in enumerate(one.read(stream)):
            inputs, targets = (_own_rows(tensor, fill, ranks) for tensor, fill in ((inputs, 0), (targets, IGNORE)))
            real = targets >= 0
            with one.forward(None if whole and stream.is_whole(index) else real.reshape(-1)):
                output: Any = model(inputs, targets, memory, memory_length=protocol.memory_length, reduction="none")
            memory = output.memory
            total += output.loss.double().sum()
            read += real.sum()
        nats, count = (float(each) for each in ranks.total(total.cpu(), read.cpu()))
        mean = nats / count if count else math.nan
        metric, value = quality(level, mean)
        return {"nats": mean if count else None, "metric": metric, "value": value, "tokens": int(count)}

    return evaluated(model, top_k, one_pass, split=split, batches=len(stream), how=how, seed=protocol.seed, ranks=ranks)


def _own_rows(tensor: Tensor, fill: int, ranks: Ranks) -> Tensor:
    """This rank's share of rows [rows, t]; as many on every rank, if need be with rows of `fill`."""
    if ranks.count == 1:
        return tensor
    each = -(-len(tensor) // ranks.count)
    own = tensor[ranks.rank * each : (ranks.rank + 1) * each]
    return torch.cat([own, own.new_full((each - len(own), *own.shape[1:]), fill)])


COUNTED = 1 << 22  # tokens counted at a time
SAME = 1e-4  # of the logits' standard deviation


def start_config(config: RunConfig, folder: str, router: str | None) -> RunConfig:
    """The settings of a run that starts from a folder: its model, with its own router or another, trained at its k."""
    model, _ = read_config(open_config(folder), folder, router)
    known = own_settings(model.family)
    own = {name: value for name, value in config.own.items() if name in known}
    return replace(
        config, model=model, own={**own, "start_from": folder}, train_top_k=str(model.top_k),
        eval_top_k=doublings(1, model.num_experts),
    )  # fmt: skip


class LanguageModelling(Task):
    """Predicts the next token of a corpus."""

    fixed_shapes = True
    vocabulary: Vocabulary

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.vocabulary = corpus.vocabulary
        self.name = corpus.name
        self.fingerprint = corpus.fingerprint
        self.whole = "train" in corpus.splits

    @classmethod
    def open(
        cls, config: RunConfig, progress: DataProgress | None = None, vocabulary: Vocabulary | None = None
    ) -> LanguageModelling:
        """The task of `config.data`, in the vocabulary of a trained run if one is given.

        Otherwise with the tokenizer of the settings, or of the model that training starts from.
        """
        tokenizer, start_from = config.own["tokenizer"], config.own["start_from"]
        if not tokenizer and start_from and has_tokenizer(Path(start_from)):
            tokenizer = start_from
        return cls(open_corpus(config.data, vocabulary=vocabulary, tokenizer=tokenizer, progress=progress))

    def check(self, config: RunConfig) -> None:
        self.batches(config, torch.device("cpu"))
        for split in (config.eval_split, self.validation_split(config) or config.eval_split):
            EvalStream(self.corpus.split(split), config.eval_batch_size, config.eval_segment_length)

    def build_model(self, config: RunConfig) -> Any:
        """The model, its routers told how often each id is in the training data, if they need that."""
        model = super().build_model(config)
        scorers: list[Any] = [router.score for _, router in named_routers(model)]
        waiting = [scorer for scorer in scorers if getattr(scorer, "needs_counts", False)]
        if waiting:
            counts = token_counts(self.corpus.split("train"), max(scorer.vocab_size for scorer in waiting))
            for scorer in waiting:
                scorer.calibrate(counts[: scorer.vocab_size].tolist())
        return model

    def started(self, config: RunConfig) -> tuple[Decoder, str]:
        """The model, and a line that says whether its logits are those of the folder's model."""
        from pointsman.hf.loading import load_model

        folder, own = config.own["start_from"], config.model
        if not isinstance(own, DecoderConfig):
            raise RunError(f"start_from={folder!r}: models of the family {own.family!r} start from no folder")
        theirs: Any = load_model(folder, dtype="float32").eval()
        model: Decoder = build_model(own)
        _, found = read_config(theirs.config, folder)
        fresh = load_theirs(model, theirs.state_dict(), found.shared)
        k = int(theirs.config.num_experts_per_tok)
        off = difference(model, theirs, k)
        if off <= SAME:
            return model, f"the model starts with the logits of {folder} (at k = {k} they differ by {off:.1g})"
        why = f"the router of {fresh[0]} starts anew" if fresh else f"the router {own.router!r} routes by another rule"
        return model, f"the model starts from the weights of {folder}, with other logits: {why}"

    def batches(self, config: RunConfig, device: torch.device) -> Batches:
        return BatchStream(self.corpus.split("train"), config.batch_size, config.segment_length, device)

    def objective(self, model: Any, config: RunConfig) -> Objective:
        return objective_of(model, label_smoothing=config.label_smoothing)

    def validation_split(self, config: RunConfig) -> str | None:
        return "valid" if "valid" in self.corpus.splits else None

    def evaluate(
        self, model: Any, config: RunConfig, split: str, top_k: Sequence[int], context: EvaluationContext
    ) -> list[dict[str, Any]]:
        return evaluate(
            model,
            self.corpus.split(split),
            self.corpus.vocabulary.level,
            split=split,
            top_k=top_k,
            protocol=eval_protocol(config, config.eval_tokens if context.final else config.valid_tokens),
            how=context,
        )

    def protocol(self, config: RunConfig) -> dict[str, Any]:
        return {
            **asdict(eval_protocol(config, config.eval_tokens)),
            "checkpoint_rule": "the last step",
            "vocabulary": "of the training data",
        }

    def observed(self, config: RunConfig, split: str, tokens: int | None, device: torch.device) -> Observed:
        stream = EvalStream(
            self.corpus.split(split), config.eval_batch_size, config.eval_segment_length, device, tokens
        )
        protocol = {
            "data": self.corpus.description,
            "split": split,
            "tokens": stream.num_tokens,
            "segments": stream.protocol,
            "segment_length": config.eval_segment_length,
            "memory_length": config.eval_memory_length,
        }
        batches = (
            Batch(inputs, targets, None if stream.is_whole(index) else targets >= 0)
            for index, (inputs, targets) in enumerate(stream)
        )

        def reader() -> Reader:
            memory: Memory | None = None

            def read(model: nn.Module, batch: Batch) -> Tensor:
                nonlocal memory
                with autocast(config, device):
                    output = model(
                        batch.inputs, batch.targets, memory, memory_length=config.eval_memory_length, reduction="none"
                    )
                memory = output.memory
                total: Tensor = output.loss.sum()
                return total

            return read

        return Observed(batches, len(stream), reader, protocol)

    def stretch(self, config: RunConfig, tokens: int) -> list[NDArray[np.int64]]:
        ids = np.asarray(self.corpus.split(config.eval_split)[:tokens]).astype(np.int64)
        step = config.eval_segment_length
        return [ids[start : start + step] for start in range(0, len(ids), step)]

    def description(self) -> dict[str, Any]:
        return {"data": self.corpus.description}


def token_counts(tokens: Any, size: int) -> NDArray[np.int64]:
    """How often each id, 0 to `size` - 1, is in `tokens` [n]."""
    counts = np.zeros(size, dtype=np.int64)
    for start in range(0, len(tokens), COUNTED):
        counts += np.bincount(tokens[start : start + COUNTED], minlength=size)
    return counts


def eval_protocol(config: RunConfig, tokens: int | None) -> EvalProtocol:
    """How a run's settings evaluate, with at most `tokens` targets."""
    return EvalProtocol(config.eval_batch_size, config.eval_segment_length, config.eval_memory_length, tokens)


def corpus_of(run: Run, spec: str | None = None, progress: DataProgress | None = None) -> Corpus:
    """A run's data, or others, in the run's vocabulary."""
    if run.config.model.family not in TASK.families:
        raise RunError(f"{run.path} learned {run.config.data}: this is for language models")
    return cast(LanguageModelling, run.task(spec, progress)).corpus
