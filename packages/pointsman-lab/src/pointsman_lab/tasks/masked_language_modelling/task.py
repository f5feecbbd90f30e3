"""Masked language modelling (Devlin et al. 2019) on multilingual text, judged by perplexity: X-MoE's pre-training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.ranks import ALONE
from pointsman_lab._files import user_path
from pointsman_lab._values import perplexity
from pointsman_lab.data.download import DataProgress
from pointsman_lab.data.pieces import Pieces, open_pieces, shares
from pointsman_lab.evaluation.diagnose import Batch
from pointsman_lab.evaluation.passes import EvaluationContext, Pass, draws, evaluated
from pointsman_lab.models.encoder import Encoder, EncoderConfig
from pointsman_lab.models.memory import Memory
from pointsman_lab.tasks.masked_language_modelling.blocks import MaskedStream, Masking, PackedText, validation_batch
from pointsman_lab.tasks.masked_language_modelling.text import open_blocks
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.kernels import autocast
from pointsman_lab.training.objectives import Objective, Outcome, logits_alone, objective_of
from pointsman_lab.training.task import Batches, Observed, Task

SCORED = Masking()
"""What is masked in evaluation, whatever training masks: 15 %, of these 80 % `<mask>`, 10 % random, 10 % unchanged."""


def masked_batches(
    text: PackedText, batch_size: int, device: torch.device | str, tokens: int | None = None
) -> list[Batch]:
    """The validation blocks with their fixed masks: all, or about `tokens` places, evenly spaced.

    Inputs [b, T] (-1 = padding) and targets [b, T] (-100 = none) are of one language each, the batch's group.
    """
    places = sum(blocks.size for blocks in text.valid.values())
    share = 1.0 if tokens is None else min(1.0, tokens / places)
    batches = []
    for group, (language, blocks) in enumerate(text.valid.items()):
        numbers = np.linspace(0, len(blocks) - 1, max(1, round(share * len(blocks)))).round().astype(int).tolist()
        for first in range(0, len(numbers), batch_size):
            both = validation_batch(text, language, numbers[first : first + batch_size], SCORED)
            inputs, targets = (one.to(device) for one in both)
            batches.append(Batch(inputs, targets, inputs >= 0, group))
    return batches


def _figures(nats: float, characters: float, masked: float) -> dict[str, Any]:
    mean = nats / masked if masked else math.nan
    return {
        "nats": mean if masked else None,
        "value": perplexity(mean),
        "nats_per_character": nats / characters if characters else None,
        "masked": int(masked),
    }


def _pooled(sums: Mapping[str, Tensor], shares: Mapping[str, float]) -> dict[str, Any]:
    """The figures over languages, each with its share of the masked positions."""
    weighted = [(shares[language] / count, nats, letters) for language, total in sums.items()
                for nats, letters, count in [total.tolist()] if count]  # fmt: skip
    if not weighted:
        raise RunError("the validation text is too short: none of its tokens is masked")
    of = sum(shares[language] for language, total in sums.items() if float(total[2]))
    nats = sum(weight * each for weight, each, _ in weighted) / of
    letters = sum(weight * each for weight, _, each in weighted) / of
    return {**_figures(nats, letters, 1), "masked": sum(int(total[2]) for total in sums.values())}


class MaskedLanguageModelling(Task):
    """Predicts masked pieces of multilingual text.

    Its reported part is the validation part: it chooses nothing, because the last step is evaluated.
    """

    fills_vocabulary = True

    def __init__(self, text: PackedText) -> None:
        self.text = text
        self.vocabulary = text.pieces
        self.name = text.name
        self.fingerprint = text.fingerprint

    @classmethod
    def open(
        cls, config: RunConfig, progress: DataProgress | None = None, vocabulary: Pieces | None = None
    ) -> MaskedLanguageModelling:
        """The task of `config.data`, in the pieces of a trained run if it is one.

        Otherwise in those that the settings name, those of the model that training starts from, or learned ones.
        """
        cls.check(config)
        if vocabulary is None and (source := config.own["tokenizer"] or config.own["start_from"]):
            vocabulary = open_pieces(user_path(source))
        return cls(
            open_blocks(
                config.data, length=config.segment_length, size=config.own["pieces"],
                exponent=config.own["language_exponent"],
                pieces=vocabulary, progress=progress,
            )
        )  # fmt: skip

    @staticmethod
    def check(config: RunConfig) -> None:
        """Refuses settings that no text can be read with."""
        masking(config)
        if not config.own["mask_rate"]:
            raise RunError("mask_rate=0: nothing would be learned; allowed are numbers above 0 to 1")
        model, length = config.model, config.segment_length
        if isinstance(model, EncoderConfig) and model.positions == "learned" and length > model.max_length:
            raise RunError(f"segment_length={length}: model.max_length is {model.max_length}")

    def started(self, config: RunConfig) -> tuple[Any, str]:
        from pointsman_lab.tasks.masked_language_modelling.start import started

        return started(config)

    def batches(self, config: RunConfig, device: torch.device) -> Batches:
        exponent = config.own["language_exponent"]
        return MaskedStream(
            self.text, config.batch_size, masking=masking(config), exponent=exponent, seed=config.seed, device=device
        )

    def objective(self, model: Any, config: RunConfig) -> Objective:
        return objective_of(
            model, masked_loss, logits_alone, label_smoothing=config.label_smoothing, weighted_by_targets=True
        )

    def reported_split(self, config: RunConfig) -> str:
        return "valid"

    @torch.no_grad()
    def evaluate(
        self, model: Any, config: RunConfig, split: str, top_k: Sequence[int], context: EvaluationContext
    ) -> list[dict[str, Any]]:
        """Scores the validation blocks at every k.

        Returns:
            For each k: {"split", "top_k", "nats", "metric": "perplexity", "value", "nats_per_character", "tokens" (real
            places read), "masked", "languages": {language: {"nats", "value", "nats_per_character", "masked"}},
            "routers"}. `nats` is the mean over languages, weighted by their shares of the training text, of each
            language's mean over masked positions; `value` its exponential.
        """
        self._check_split(split)
        device = next(model.parameters()).device
        characters = torch.from_numpy(self.text.pieces.characters).to(device)
        tokens = config.eval_tokens if context.final else config.valid_tokens
        batches = masked_batches(self.text, config.eval_batch_size, device, tokens)
        drawn = shares(self.text.sizes, config.own["language_exponent"])
        ranks = ALONE if draws(model) else context.ranks

        def one_pass(one: Pass) -> dict[str, Any]:
            sums = [torch.zeros(3, dtype=torch.float64, device=device) for _ in self.text.valid]
            read = 0
            for batch, counts in one.share(batches):
                assert batch.targets is not None
                assert batch.group is not None
                real = batch.inputs >= 0
                with one.forward(real.reshape(-1), counts=counts):
                    nats: Tensor = model(batch.inputs, batch.targets)
                if counts:
                    read += int(real.sum())
                    masked = batch.targets[batch.targets >= 0]
                    sums[batch.group] += torch.stack(
                        [nats.double().sum(), characters[masked].sum().double(), nats.new_tensor(len(masked)).double()]
                    )
            *summed, places = ranks.total(*sums, torch.tensor(read, device=device))
            of = dict(zip(self.text.valid, summed, strict=True))
            languages = {language: _figures(*total.tolist()) for language, total in of.items()}
            return {"metric": "perplexity", **_pooled(of, drawn), "tokens": int(places), "languages": languages}

        return evaluated(model, top_k, one_pass, split=split, batches=len(batches), how=context, ranks=ranks)

    def protocol(self, config: RunConfig) -> dict[str, Any]:
        return {
            "batch_size": config.eval_batch_size,
            "block_length": config.segment_length,
            "tokens": config.eval_tokens,
            "masked": [SCORED.rate, SCORED.mask_share, SCORED.random_share],
            "shares": shares(self.text.sizes, config.own["language_exponent"]),
            "checkpoint_rule": "the last step",
            "vocabulary": self.text.pieces.digest,
        }

    def observed(self, config: RunConfig, split: str, tokens: int | None, device: torch.device) -> Observed:
        """The validation blocks with their fixed masks; groups are languages."""
        self._check_split(split)
        batches = masked_batches(self.text, config.eval_batch_size, device, tokens)

        def read(model: nn.Module, batch: Batch) -> Tensor:
            with autocast(config, device):
                total: Tensor = model(batch.inputs, batch.targets).sum()
            return total

        read_tokens = sum(int((one.inputs >= 0).sum()) for one in batches)
        protocol = {
            "data": self.text.description, "split": split, "tokens": read_tokens, "block_length": config.segment_length
        }  # fmt: skip
        return Observed(batches, len(batches), lambda: read, protocol, tuple(self.text.valid))

    def stretch(self, config: RunConfig, tokens: int) -> list[NDArray[np.int64]]:
        """Validation blocks without masks, of each language alike."""
        count = max(1, tokens // (config.segment_length * len(self.text.valid)))
        rows = [row for blocks in self.text.valid.values() for row in blocks[:count]]
        return [row[row >= 0].astype(np.int64) for row in rows]

    def _check_split(self, split: str) -> None:
        if split != "valid":
            raise RunError(f"masked language modelling has no {split} part: allowed is valid")

    def description(self) -> dict[str, Any]:
        words = f"{self.text.description}; perplexities compare only with the same pieces"
        return {"data": words, "truncated_sentences": self.text.cut}


def masking(config: RunConfig) -> Masking:
    """What training masks."""
    return Masking(*(config.own[name] for name in ("mask_rate", "mask_token_share", "random_share")))


def masked_loss(model: Encoder, inputs: Tensor, targets: Tensor, memory: Memory | None, length: int) -> Outcome:
    """Mean nats of the masked positions; 0 where nothing is masked."""
    nats = model(inputs, targets)
    loss = nats.sum() / max(1, len(nats))
    return Outcome(loss, loss.detach(), None)
