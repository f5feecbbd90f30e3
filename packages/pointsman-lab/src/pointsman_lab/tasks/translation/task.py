"""Translation: the task of encoder-decoders, judged by BLEU (X-MoE, Table 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pointsman._errors import RunError, needing
from pointsman_lab.data.download import DataProgress
from pointsman_lab.data.pieces import START, Pieces, shares
from pointsman_lab.data.streams import IGNORE
from pointsman_lab.data.task_streams import PADDING, Encoded, TaskStream, eval_batches, padded
from pointsman_lab.evaluation.diagnose import Batch
from pointsman_lab.evaluation.passes import EvaluationContext, Pass, evaluated
from pointsman_lab.runs.paths import slug
from pointsman_lab.tasks.translation.data import Pairs, ParallelText, ended, open_parallel
from pointsman_lab.tasks.translation.model import LENGTH_PENALTY, LONGER, MORE, TranslationConfig, search
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.objectives import Objective, class_loss, logits_alone, objective_of
from pointsman_lab.training.task import Batches, Observed, Task, shown_k, target_nats

TOKENS_A_SENTENCE = 20
"""`eval_tokens` and `valid_tokens` count sentences as so many tokens."""


class Translation(Task):
    """Translates sentences of several languages into one."""

    vocabulary: Pieces

    def __init__(self, text: ParallelText, pieces: Pieces) -> None:
        self.text = text
        self.vocabulary = pieces
        self.name = text.name
        self.scorer = f"sacrebleu REFERENCES -i TRANSLATIONS -l SOURCE-{text.target}"
        self.fingerprint = f"{text.fingerprint}-{pieces.digest}"
        self._encoded: dict[int, Encoded] = {}
        self._kept: dict[int, dict[str, list[str]]] = {}
        self._split, self._scored = "test", dict[str, Pairs]()

    @classmethod
    def open(
        cls, config: RunConfig, progress: DataProgress | None = None, vocabulary: Pieces | None = None
    ) -> Translation:
        """The task of `config.data`, with pieces learned from it or with those of a trained run."""
        cls.check(config)
        text = open_parallel(config.data)
        return cls(text, vocabulary or text.pieces(config.own["pieces"], config.own["language_exponent"]))

    @staticmethod
    def check(config: RunConfig) -> None:
        """Refuses sentences longer than the model's positions."""
        model = config.model
        if isinstance(model, TranslationConfig) and config.segment_length > model.max_length:
            raise RunError(f"segment_length={config.segment_length}: model.max_length is {model.max_length}")

    def encoded(self, length: int) -> Encoded:
        """The training pairs of all source languages."""
        if length not in self._encoded:
            self._encoded[length] = self._encode(
                [pair for pairs in self.text.parts["train"].values() for pair in pairs], length
            )
            if cut := self._encoded[length].truncated:
                of = len(self._encoded[length])
                self.notes = (f"{self.name} train: {cut:,} of {of:,} pairs cut to {length} pieces",)
        return self._encoded[length]

    def _encode(self, pairs: Sequence[tuple[str, str]], length: int) -> Encoded:
        """Rows of source ids, labels [n, T] of target ids, padded with -1."""
        whole = [[self.vocabulary.encode(text) for text in pair] for pair in pairs]
        cut = sum(max(map(len, pair)) >= length for pair in whole)
        sources, targets = ([ended(ids, length) for ids in side] for side in zip(*whole, strict=True))
        return Encoded(tuple(sources), padded(targets).numpy(), cut)

    def observed(self, config: RunConfig, split: str, tokens: int | None, device: torch.device) -> Observed:
        """Pairs of a part, the right translation as the decoder's input; groups are source languages."""
        if split not in self.text.parts:
            raise RunError(f"translation has no {split} part: allowed are {', '.join(self.text.parts)}")
        count = self._budget(tokens, split)
        names = tuple(self.text.parts[split])
        batches = []
        for number, pairs in enumerate(self.text.parts[split].values()):
            encoded = self._encode(pairs[:count], config.segment_length)
            for one in eval_batches(encoded, config.eval_batch_size, device):
                inputs, targets = paired(one.tokens, one.labels)
                batches.append(Batch(inputs, targets, None, number))
        read_tokens = sum(int((one.inputs >= 0).sum()) for one in batches)
        protocol = {"data": self.text.description, "split": split, "tokens": read_tokens}
        return Observed(batches, len(batches), lambda: target_nats(config, device), protocol, names)

    def stretch(self, config: RunConfig, tokens: int) -> list[NDArray[np.int64]]:
        """Source sentences, of each language alike: the page looks at the encoder's layers."""
        parts = self.text.parts[config.eval_split]
        found = []
        for pairs in parts.values():
            left = tokens // len(parts)
            for source, _ in pairs:
                found.append(ended(self.vocabulary.encode(source), config.segment_length))
                left -= len(found[-1])
                if left <= 0:
                    break
        return found

    def _budget(self, tokens: int | None, split: str) -> int | None:
        """How many pairs of each source language have about so many tokens; None: all."""
        return None if tokens is None else max(1, tokens // (TOKENS_A_SENTENCE * len(self.text.parts[split])))

    def batches(self, config: RunConfig, device: torch.device) -> Batches:
        sizes = {language: len(pairs) for language, pairs in self.text.parts["train"].items()}
        drawn = shares(sizes, config.own["language_exponent"]) if len(set(sizes.values())) > 1 else {}
        starts = np.cumsum([0, *sizes.values()])[:-1].tolist()
        return PairStream(
            self.encoded(config.segment_length), config.batch_size, config.seed, device,
            dict(zip(starts, drawn.values(), strict=False)),
        )  # fmt: skip

    def objective(self, model: Any, config: RunConfig) -> Objective:
        scorers(self.text.target)  # what the evaluation needs, before the training
        return objective_of(
            model, class_loss, logits_alone, label_smoothing=config.label_smoothing, weighted_by_targets=True
        )

    @torch.no_grad()
    def evaluate(
        self, model: Any, config: RunConfig, split: str, top_k: Sequence[int], context: EvaluationContext
    ) -> list[dict[str, Any]]:
        """Translates every language's part and scores it at every k.

        Returns:
            For each k: {"split", "top_k", "nats": None, "metric": "bleu", "tokens": pieces of the sources, "value":
            mean over source languages, "chrf", "signature", "languages": {language: {"value", "chrf", "sentences",
            "cut": how many sources were too long}}, "routers": of the encoder's side}.
        """
        if split not in ("valid", "test"):
            raise RunError(f"translation has no {split} part to score: allowed are valid and test")
        count = self._budget(config.eval_tokens if context.final else config.valid_tokens, split)
        beam, batch_size = config.own["beam"] if context.final else 1, config.eval_batch_size
        self._kept, self._split = {}, split
        self._scored = {language: pairs[:count] for language, pairs in self.text.parts[split].items()}
        metrics = scorers(self.text.target)
        device = next(model.parameters()).device

        def one_pass(one: Pass) -> dict[str, Any]:
            languages: dict[str, dict[str, Any]] = {}
            self._kept[one.top_k] = kept = {}
            read = 0
            for language, pairs in self._scored.items():
                whole = [self.vocabulary.encode(each) for each, _ in pairs]
                cut = sum(len(ids) >= config.segment_length for ids in whole)
                sources = [ended(ids, config.segment_length) for ids in whole]
                read += sum(map(len, sources))
                order = sorted(range(len(sources)), key=lambda place: len(sources[place]))
                kept[language] = found = [""] * len(pairs)
                for start in one.read(range(0, len(order), batch_size)):
                    places = order[start : start + batch_size]
                    source = padded([sources[place] for place in places]).to(device)
                    if context.final:
                        with one.forward((source >= 0).reshape(-1)):
                            model.encode(source)
                    with one.forward(counts=False):
                        for place, ids in zip(places, search(model, source, beam), strict=True):
                            found[place] = self.vocabulary.decode(ids)
                references = [[other for _, other in pairs]]
                bleu, chrf = (metric.corpus_score(found, references).score for metric in metrics)
                languages[language] = {"value": bleu, "chrf": chrf, "sentences": len(pairs), "cut": cut}
            means = {key: float(np.mean([each[key] for each in languages.values()])) for key in ("value", "chrf")}
            signature = [str(metric.get_signature()) for metric in metrics]
            figures = {"nats": None, "metric": "bleu", "tokens": read, **means}
            return {**figures, "signature": signature, "languages": languages}

        batches = sum(-(-len(pairs) // batch_size) for pairs in self._scored.values())
        return evaluated(model, top_k, one_pass, split=split, batches=batches, how=context)

    def result_files(self, config: RunConfig) -> Mapping[str, str]:
        """Translations at the k of training, else the largest, and references, a sentence a line, as sacrebleu reads
        them."""
        if not self._kept:
            return {}
        target = self.text.target
        files = {}
        for language, found in self._kept[shown_k(config, self._kept)].items():
            references = [other for _, other in self._scored[language]]
            for kind, lines in (("translations", found), ("references", references)):
                name = f"predictions/{slug(self.name)}/{self._split}-{kind}.{language}-{target}.txt"
                files[name] = "".join(f"{line}\n" for line in lines)
        return files

    def protocol(self, config: RunConfig) -> dict[str, Any]:
        return {
            "beam": config.own["beam"],
            "length_penalty": LENGTH_PENALTY,
            "longest": [LONGER, MORE],
            "source_length": config.segment_length,
            "tokens": config.eval_tokens,
            "checkpoint_rule": "the last step",
            "vocabulary": self.vocabulary.digest,
        }

    def description(self) -> dict[str, Any]:
        return {"data": f"{self.text.description}; {self.vocabulary.size:,} pieces"}


class PairStream(TaskStream):
    """Batches of like length: inputs [B, 2, L] (source; `<s>` and the target without its end) and targets [B, L].

    Args:
        shares: place of a language's first pair -> its share of the batches.
    """

    def __init__(
        self, encoded: Encoded, batch_size: int, seed: int, device: torch.device, shares: Mapping[int, float]
    ) -> None:
        super().__init__(encoded, batch_size, seed, device)
        self._shares = shares

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return paired(*super().batch(step))

    def _order(self, draw: np.random.Generator) -> NDArray[np.int64]:
        """Where languages have texts of different size: of each so many pairs as its share says, rare ones again."""
        if len(self._shares) < 2:
            return super()._order(draw)
        starts = [*self._shares, len(self.encoded)]
        found = [
            np.resize(start + draw.permutation(stop - start), max(1, round(share * len(self.encoded))))
            for (start, share), stop in zip(self._shares.items(), starts[1:], strict=True)
        ]
        return draw.permutation(np.concatenate(found))


def paired(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """source [B, S] and target [B, T], padded with -1 -> inputs [B, 2, L] and targets [B, L], padded with -100."""
    length = max(source.shape[1], int((target >= 0).sum(1).max()))
    target = target[:, :length]
    shifted = F.pad(torch.where(target[:, 1:] >= 0, target[:, :-1], PADDING), (1, 0), value=START)
    source, shifted = (F.pad(rows, (0, length - rows.shape[1]), value=PADDING) for rows in (source, shifted))
    targets = F.pad(torch.where(target >= 0, target, IGNORE), (0, length - target.shape[1]), value=IGNORE)
    return torch.stack([source, shifted], 1), targets


def scorers(target: str) -> tuple[Any, Any]:
    """BLEU, of words as sacrebleu splits this language, and chrF."""
    with needing("BLEU needs sacrebleu", "translate"):
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    try:
        return BLEU(trg_lang=target), CHRF()
    except RuntimeError:  # its text has several lines
        raise RunError(f"BLEU of {target!r} needs a tokenizer: pip install 'sacrebleu[{target}]'") from None
