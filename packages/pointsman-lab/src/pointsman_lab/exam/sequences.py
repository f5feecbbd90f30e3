"""Tasks in which the routing depends on a token's sequence, or on its id."""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman import AttentionTrace
from pointsman_lab.exam.clusters import Clusters
from pointsman_lab.exam.task import Batch, Task, World, choose
from pointsman_lab.registry import sentences


class Neighbours(Clusters):
    name = "neighbours"
    asks = "Does the router use what the other tokens of the sequence tell?"
    formula = "as clusters, all 32 tokens of a sequence in one cluster, x = 2 mu_c + n; a router may see the sequence"
    why = "Mutual-Inform's claim: tokens inform each other's routing. A single token hardly shows its cluster."
    amplitude = 2.0
    batch = 16
    length = 32

    def clusters(self, generator: torch.Generator, shape: tuple[int, int, int], progress: float) -> Tensor:
        return choose(generator, self.frequencies(progress), (*shape[:2], 1)).expand(shape)


class NeighboursCausal(Neighbours):
    name = "neighbours-causal"
    asks = "The same where only earlier tokens tell, and a router may see only these?"
    formula = (
        "as neighbours, with x = 3 mu_c + n in the first half of a sequence and x = n in the second, on which it is "
        "judged; a router may see earlier tokens"
    )
    why = "What is left of Mutual-Inform in a decoder."
    causal = True

    def inputs(self, world: World, generator: torch.Generator, cluster: Tensor) -> Tensor:
        early = (torch.arange(cluster.shape[-1]) < self.length // 2)[:, None]
        noise = torch.randn(*cluster.shape, self.dim, generator=generator)
        return 3 * early * world["centres"][cluster] + noise

    def value(self, output: Tensor, batch: Batch) -> float:
        late = torch.arange(self.length) >= self.length // 2
        return super().value(output, batch._replace(weight=batch.weight * late))


class Ids(Clusters):
    name = "ids"
    asks = "Does the router use the token's id, which alone decides?"
    formula = "8 ids; x = 1.5 mu_id + n, y = A_id x: the hidden state hardly shows the id, the table would"
    why = "Hash layers, StableMoE's second stage and masks by token route by ids."
    amplitude = 1.5
    vocabulary = 8

    def draw(self, world: World, generator: torch.Generator, shape: tuple[int, int, int], progress: float) -> Batch:
        batch = super().draw(world, generator, shape, progress)
        return batch._replace(ids=batch.cluster)


class Sources(Task):
    name = "sources"
    asks = "Does the router of a language model tell apart the sources of its text?"
    formula = (
        "sequences of 64 tokens from 8 Markov chains over 16 tokens, rows of the transition matrices drawn from "
        "Dirichlet(0.1), one chain a sequence; embeddings of the last two tokens, one causal attention head, the "
        "layer, a linear head; judged on the second half of the sequences"
    )
    floor = "0: the true chain's own cross-entropy, on the same tokens"
    why = "Routing in a language model with attention, whose best loss is known."
    measure = "cross-entropy above that of the true chains, as a share of it"
    sources, states = 8, 16
    causal = True
    dim, hidden, vocabulary = 32, 32, 16
    switch = 0.0
    steps = 600

    def world(self, seed: int) -> World:
        generator = self.generator(seed, "world")
        gamma = torch._standard_gamma(torch.full((self.sources, self.states, self.states), 0.1), generator)
        chains = (gamma + 1e-6) / (gamma + 1e-6).sum(-1, keepdim=True)
        return {"chains": chains}

    def draw(self, world: World, generator: torch.Generator, shape: tuple[int, int, int], progress: float) -> Batch:
        steps, batch, length = shape
        text, cluster, own = self.texts(world, generator, steps * batch, length, test=steps == 1)
        last, now = text[:, :-2], text[:, 1:-1]
        both = torch.stack([now, last + self.states], -1)
        inputs = torch.zeros(*now.shape, 2 * self.states).scatter_(-1, both, 1.0)
        cluster = cluster.reshape(shape)
        return Batch(
            inputs.view(*shape, -1), text[:, 2:].reshape(shape), cluster[..., None], torch.ones(*shape, 1), cluster,
            own.reshape(shape), now.reshape(shape),
        )  # fmt: skip

    def texts(
        self, world: World, generator: torch.Generator, rows: int, length: int, *, test: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [rows, T + 2]; the source of each that follows two others [rows, T], and its true cross-entropy."""
        uniform = torch.rand(rows, length + 1, generator=generator)
        states = torch.randint(self.states, (rows,), generator=generator)
        source = torch.randint(self.sources, (rows, length + 1), generator=generator)
        moved = torch.rand(rows, length + 1, generator=generator) < self.switch
        steps_since = torch.arange(length + 1) * (moved | (torch.arange(length + 1) == 0))
        source = source.gather(1, steps_since.cummax(1).values)
        limits = world["chains"].cumsum(-1)
        tokens = [states]
        for t in range(length + 1):
            row = limits[source[:, t], states]
            states = (row < uniform[:, t, None] * row[:, -1:]).sum(-1).clamp_max(self.states - 1)
            tokens.append(states)
        text = torch.stack(tokens, 1)
        own = -world["chains"].log()[source[:, 1:], text[:, 1:-1], text[:, 2:]]  # of the chain itself
        return text, source[:, 1:], own

    def below(self) -> nn.Module:
        return Attention(2 * self.states, self.dim)

    def above(self) -> nn.Module:
        return nn.Linear(self.dim, self.states)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch.targets.flatten())

    def value(self, output: Tensor, batch: Batch) -> float:
        half = batch.targets.shape[1] // 2
        nats = F.cross_entropy(output[:, half:].flatten(0, 1), batch.targets[:, half:].flatten())
        own = batch.weight[:, half:].mean()  # of the same tokens
        return float((nats - own) / own)


class SourcesSwitching(Sources):
    name = "sources-switching"
    asks = "The same where the source switches inside the sequence?"
    formula = "as sources; before each token a new source is drawn with probability 1/16"
    why = "A document that changes its language: the routing must follow within a few tokens."
    switch = 1 / 16


class Languages(Sources):
    name = "languages"
    asks = "Does the router of a language model tell apart the languages of real text?"
    formula = (
        "windows of 66 bytes of 18 languages (`xtreme-text`), equally frequent; the model of sources with 18 experts; "
        "the last twentieth of each language's text is for the test; judged on the second half of the windows"
    )
    floor = "not known: the oracle routes by language, which is a reference and no optimum"
    why = "Whether what is found on made-up sources is found on real text."
    measure = "bits per byte"
    known = False
    experts, states, vocabulary = 18, 256, 256
    names = ("ar", "bg", "cs", "de", "el", "en", "es", "fr", "hi", "ja", "ko", "ru", "sw", "th", "tr", "ur", "vi", "zh")

    def world(self, seed: int) -> World:
        return {"text": language_bytes(self.names)}

    def texts(
        self, world: World, generator: torch.Generator, rows: int, length: int, *, test: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        text = world["text"]
        language = torch.randint(len(text), (rows,), generator=generator)
        border = text.shape[1] * 19 // 20
        first, last = (border, text.shape[1]) if test else (0, border)
        start = torch.randint(first, last - length - 1, (rows,), generator=generator)
        windows = text[language[:, None], start[:, None] + torch.arange(length + 2)].long()
        return windows, language[:, None].expand(rows, length), torch.zeros(rows, length)

    def value(self, output: Tensor, batch: Batch) -> float:
        half = batch.targets.shape[1] // 2
        return float(F.cross_entropy(output[:, half:].flatten(0, 1), batch.targets[:, half:].flatten()) / math.log(2))


@cache
def language_bytes(names: tuple[str, ...]) -> Tensor:
    """[languages, bytes] uint8: as much of each language of `xtreme-text` as the smallest one has."""
    text = sentences(f"xtreme-text:languages={'+'.join(names)}")
    joined = [" ".join(text.train[name]).encode() for name in names]
    least = min(map(len, joined))
    return torch.stack([torch.frombuffer(bytearray(one[:least]), dtype=torch.uint8) for one in joined])


class Attention(nn.Module):
    """Embeds, and adds one causal attention head; `trace` is of the last call."""

    trace: AttentionTrace

    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, dim)
        self.mixed = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.embed(inputs)
        query, key, value = self.mixed(hidden)[:, None].chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.out(mixed[:, 0])
        scale, weight = query.shape[-1] ** -0.5, self.out.weight.T[None]
        self.trace = AttentionTrace(query, key, value, weight, output, scale, causal=True)
        return hidden + output
