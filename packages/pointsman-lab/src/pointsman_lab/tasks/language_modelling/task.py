"""Language modelling: predicting the next token of a corpus, judged by bits per character or perplexity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman.diagnostics.diagnose import Batch, Reader
from pointsman_lab.data.corpus import Corpus, open_corpus
from pointsman_lab.data.download import DataProgress
from pointsman_lab.data.streams import BatchStream, EvalStream
from pointsman_lab.data.subwords import has_tokenizer
from pointsman_lab.data.vocabulary import Vocabulary
from pointsman_lab.evaluation.passes import EvaluationContext
from pointsman_lab.tasks.language_modelling.evaluation import EvalProtocol, evaluate
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.kernels import autocast
from pointsman_lab.training.objectives import Objective, objective_of
from pointsman_lab.training.run import Run
from pointsman_lab.training.task import Batches, Observed, Task

COUNTED = 1 << 22  # tokens counted at a time


class LanguageModelling(Task):
    """Predicts the next token of a corpus."""

    fixed_shapes = True
    vocabulary: Vocabulary

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.vocabulary = corpus.vocabulary
        self.name = corpus.name
        self.fingerprint = corpus.fingerprint

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
        EvalStream(self.corpus.split(config.eval_split), config.eval_batch_size, config.eval_segment_length)

    def build_model(self, config: RunConfig) -> Any:
        return self._calibrated(super().build_model(config))

    def started(self, config: RunConfig) -> tuple[Any, str]:
        from pointsman_lab.tasks.language_modelling.start import started

        return started(config)

    def _calibrated(self, model: nn.Module) -> nn.Module:
        """The model, its routers told how often each id is in the training data, if they need that."""
        scorers: list[Any] = [router.score for _, router in named_routers(model)]
        waiting = [scorer for scorer in scorers if getattr(scorer, "needs_counts", False)]
        if waiting:
            counts = token_counts(self.corpus.split("train"), max(scorer.vocab_size for scorer in waiting))
            for scorer in waiting:
                scorer.calibrate(counts[: scorer.vocab_size].tolist())
        return model

    def batches(self, config: RunConfig, device: torch.device) -> Batches:
        return BatchStream(self.corpus.split("train"), config.batch_size, config.segment_length, device)

    def objective(self, model: Any, config: RunConfig) -> Objective:
        return objective_of(model, label_smoothing=config.label_smoothing)

    def validation_split(self, config: RunConfig) -> str | None:
        return "valid" if "valid" in self.corpus.splits else None

    def reported_split(self, config: RunConfig) -> str:
        return config.eval_split

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
            **eval_protocol(config, config.eval_tokens).to_dict(),
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
        return Observed(_observed(stream), len(stream), lambda: _reader(config, device), protocol)

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


def _observed(stream: EvalStream) -> Iterator[Batch]:
    for inputs, targets in stream:
        real = targets >= 0
        yield Batch(inputs, targets, None if bool(real.all()) else real)


def _reader(config: RunConfig, device: torch.device) -> Reader:
    """A reader with memory, in the run's precision; the loss is the sum of nats."""
    memory: list[Any] = [None]

    def read(model: nn.Module, batch: Batch) -> Tensor:
        with autocast(config, device):
            output = model(
                batch.inputs, batch.targets, memory[0], memory_length=config.eval_memory_length, reduction="none"
            )
        memory[0] = output.memory
        total: Tensor = output.loss.sum()
        return total

    return read


def eval_protocol(config: RunConfig, tokens: int | None) -> EvalProtocol:
    """How a run's settings evaluate, with at most `tokens` targets."""
    return EvalProtocol(config.eval_batch_size, config.eval_segment_length, config.eval_memory_length, tokens)


def corpus_of(run: Run, spec: str | None = None, progress: DataProgress | None = None) -> Corpus:
    """A run's data, or others, in the run's vocabulary."""
    if not isinstance(run.vocabulary, Vocabulary):
        raise RunError(f"{run.path} learned {run.config.data}: this is for language models")
    return open_corpus(spec or run.config.data, vocabulary=run.vocabulary, progress=progress)
