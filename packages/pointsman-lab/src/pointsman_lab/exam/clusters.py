"""Tasks of single tokens in clusters, each of which has one linear teacher."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman_lab.exam.task import Batch, Task, World, applied, choose, directions, linear_maps


class Clusters(Task):
    """Tokens x = a mu_c + n with targets A_c x."""

    name = "clusters"
    asks = "Does the router find eight clusters that are equally frequent, and use all experts?"
    formula = "c uniform in 1..8, mu_c random unit vectors in 32 dimensions, n ~ N(0, I): x = 5 mu_c + n, y = A_c x"
    floor = "0: an expert of 64 hidden units can be any linear map of 32 dimensions"
    why = "The least that is asked of a router. What fails here fails everywhere."
    number = 8
    amplitude = 5.0

    def world(self, seed: int) -> World:
        generator = self.generator(seed, "world")
        centres = directions(generator, self.number, self.dim)
        return {"centres": centres, "maps": linear_maps(generator, self.experts, self.dim)}

    def frequencies(self, progress: float) -> Tensor:
        return torch.ones(self.number)

    def owner(self, cluster: Tensor, progress: float) -> Tensor:
        """The expert of each cluster."""
        return cluster % self.experts

    def inputs(self, world: World, generator: torch.Generator, cluster: Tensor) -> Tensor:
        noise = torch.randn(*cluster.shape, self.dim, generator=generator)
        return self.amplitude * world["centres"][cluster] + noise

    def clusters(self, generator: torch.Generator, shape: tuple[int, int, int], progress: float) -> Tensor:
        return choose(generator, self.frequencies(progress), shape)

    def targets(self, world: World, inputs: Tensor, owner: Tensor) -> Tensor:
        return applied(world["maps"], owner, inputs)

    def weight(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return torch.ones(inputs.shape[:-1])

    def draw(self, world: World, generator: torch.Generator, shape: tuple[int, int, int], progress: float) -> Batch:
        cluster = self.clusters(generator, shape, progress)
        inputs = self.inputs(world, generator, cluster)
        owner = self.owner(cluster, progress)
        ids = torch.randint(self.vocabulary, shape, generator=generator)
        targets, weight = self.targets(world, inputs, owner), self.weight(inputs, generator)
        label = torch.where(owner < 0, self.experts, owner)
        return Batch(inputs, targets, owner[..., None], (owner >= 0).float()[..., None], label, weight, ids)


class Many(Clusters):
    name = "many"
    asks = "Is the scorer expressive enough for clusters that no linear map separates?"
    formula = (
        "as clusters, with 32 clusters whose centres lie in 8 of the 32 dimensions (x = 8 mu_c + n); "
        "cluster c has the teacher c mod 8"
    )
    why = "One expert serves what lies apart. A linear scorer gives every expert one convex region."
    number = 32
    amplitude = 8.0

    def world(self, seed: int) -> World:
        world = dict(super().world(seed))
        centres = torch.zeros(self.number, self.dim)
        centres[:, :8] = directions(self.generator(seed, "centres"), self.number, 8)
        return {**world, "centres": centres}


class Zipf(Clusters):
    name = "zipf"
    asks = "Does balancing cost quality where the truth is not balanced?"
    formula = "as clusters, with p(c) proportional to 1 / c"
    why = "Topics and tokens of text are Zipf distributed. Equal loads are wrong here by construction."

    def frequencies(self, progress: float) -> Tensor:
        return 1 / torch.arange(1, self.number + 1).float()


class Norms(Clusters):
    name = "norms"
    asks = "Does the router bear norms that say nothing?"
    formula = "as clusters, x = s (5 mu_c + n) with log s ~ N(0, 1); the squared error of a token is divided by s^2"
    why = (
        "Norms of hidden states vary by orders of magnitude; the direction decides. Cosine routers claim to care less."
    )

    def inputs(self, world: World, generator: torch.Generator, cluster: Tensor) -> Tensor:
        inputs = super().inputs(world, generator, cluster)
        return inputs * torch.exp(torch.randn(*cluster.shape, 1, generator=generator))

    def weight(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return (self.amplitude**2 + self.dim) / inputs.square().sum(-1)


class Outliers(Clusters):
    name = "outliers"
    asks = "Does the routing stay where a token is corrupted?"
    formula = (
        "as clusters, and to a tenth of the tokens a random vector of norm 10 is added before y = A_c x is taken; "
        "the squared error is divided by |x|^2; judged on tokens with |x| > 9: the corrupted ones, and about 4 % of "
        "the others, which are a quarter of those judged"
    )
    why = "A router that follows the largest direction sends corrupted tokens to a wrong expert."
    rate, size = 0.1, 10.0
    steps = 600

    def inputs(self, world: World, generator: torch.Generator, cluster: Tensor) -> Tensor:
        inputs = super().inputs(world, generator, cluster)
        hit = torch.rand(*cluster.shape, 1, generator=generator) < self.rate
        push = F.normalize(torch.randn(*cluster.shape, self.dim, generator=generator), dim=-1)
        return inputs + self.size * hit * push

    def weight(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return (self.amplitude**2 + self.dim) / inputs.square().sum(-1)

    def value(self, output: Tensor, batch: Batch) -> float:
        hit = batch.inputs.norm(dim=-1) > (self.size + self.amplitude) * 0.6
        return super().value(output, batch._replace(weight=batch.weight * hit))


class Nothing(Clusters):
    name = "nothing"
    asks = "Does the router give no expert to tokens that need none?"
    formula = "as clusters with 16 clusters; y = A_c x for c = 1..8, y = 0 for c = 9..16"
    why = "Null experts and mixtures of depths claim that many tokens need nothing."
    number = 16

    def owner(self, cluster: Tensor, progress: float) -> Tensor:
        return torch.where(cluster < self.experts, cluster, -1)

    def targets(self, world: World, inputs: Tensor, owner: Tensor) -> Tensor:
        return applied(world["maps"], owner.clamp_min(0), inputs) * (owner >= 0)[..., None]


class Teacher(Clusters):
    name = "teacher"
    asks = "Does the router find the regions of another router, where there are no clusters?"
    formula = "x ~ N(0, I), c = argmax_e (W x)_e with W a random matrix [8, 32], y = A_c x"
    why = "What distillation and upcycling meet: the routing of a frozen mixture of experts, with all its borders."

    def draw(self, world: World, generator: torch.Generator, shape: tuple[int, int, int], progress: float) -> Batch:
        inputs = torch.randn(*shape, self.dim, generator=generator)
        owner = (inputs @ world["centres"].T).argmax(-1)
        ids = torch.randint(self.vocabulary, shape, generator=generator)
        one = torch.ones(*shape)
        return Batch(inputs, self.targets(world, inputs, owner), owner[..., None], one[..., None], owner, one, ids)


class Collapse(Clusters):
    """The signal lies in the first two dimensions; the teachers read the others."""

    name = "collapse"
    asks = "Does the router hold on to a weak signal where experts pull the hidden states together?"
    formula = (
        "u in 64 dimensions: the first two are 4 (cos, sin)(2 pi c / 8) + n, the others N(0, I); h = u + V u with a "
        "trained V that starts at 0; y = A_c u, A_c of rank 16, blind to the first two dimensions"
    )
    floor = "0: V = 0, and an expert of 64 hidden units can be a linear map of rank 16"
    why = "X-MoE's claim: a linear router draws hidden states towards its experts' vectors; few dimensions suffice."
    dim = 64

    def world(self, seed: int) -> World:
        generator = self.generator(seed, "world")
        angle = torch.arange(self.number) * (2 * torch.pi / self.number)
        centres = torch.zeros(self.number, self.dim)
        centres[:, 0], centres[:, 1] = angle.cos(), angle.sin()
        first = torch.randn(self.experts, self.dim, 16, generator=generator) / 4
        first[:, :2] = 0
        second = torch.randn(self.experts, 16, self.dim, generator=generator) / 8
        return {"centres": 0.8 * centres, "maps": first @ second}

    def below(self) -> nn.Module:
        return Added(self.dim)


class Added(nn.Module):
    """u + V u, V from 0."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, dim))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + inputs @ self.weight


class Drift(Clusters):
    name = "drift"
    asks = "How soon does the router follow where clusters change owner?"
    formula = "as clusters; after half of the steps cluster c has the teacher of cluster c + 3 mod 8"
    why = "Later layers change under a router all through training: fluctuation and recovery in one number."
    measure = "mean over the second half of the training of the share of variance that is not explained"
    steps = 600
    flat = 0.75

    def owner(self, cluster: Tensor, progress: float) -> Tensor:
        return (cluster + 3 * (progress >= 0.5)) % self.experts

    def judge(self, curve: dict[int, float]) -> float:  # type: ignore[override]
        late = [value for step, value in curve.items() if step > self.steps // 2]
        return sum(late) / len(late)


class Freeze(Clusters):
    name = "freeze"
    asks = "Does the router keep what it learned first?"
    formula = "clusters 1..4 in the first half of the training, 5..8 in the second; judged on all eight"
    why = "Frozen routers are said to forget less; a balance loss spends all experts on the first half."
    steps = 600
    cycles = 2

    def frequencies(self, progress: float) -> Tensor:
        first = torch.arange(self.number) < self.number // 2
        return torch.ones(self.number) if progress == 1 else (first if progress < 0.5 else ~first).float()

    def test(self, world: World, seed: int, progress: float = 1.0) -> Batch:
        return super().test(world, seed)
