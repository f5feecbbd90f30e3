"""Tasks in which a token needs several teachers at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman_lab.exam.clusters import Clusters
from pointsman_lab.exam.task import Batch, World, directions, linear_maps


class Parts(Clusters):
    """Cluster c needs the parts `world["experts"][c]` with the weights `world["shares"][c]`."""

    def shares(self, seed: int) -> Tensor:
        """[C, w], weights of the parts of each cluster, 0 = no part."""
        raise NotImplementedError

    def parts(self, generator: torch.Generator) -> Tensor:
        return linear_maps(generator, self.experts, self.dim)

    def centres(self, generator: torch.Generator) -> Tensor:
        return directions(generator, self.number, self.dim)

    def world(self, seed: int) -> World:
        generator = self.generator(seed, "world")
        shares, parts = self.shares(seed), self.parts(generator)
        experts = torch.stack([torch.randperm(self.experts, generator=generator) for _ in range(self.number)])
        experts = experts[:, : shares.shape[1]]
        return {
            "centres": self.centres(generator),
            "experts": experts.masked_fill(shares == 0, -1),
            "shares": shares,
            "parts": parts[experts],
            "maps": torch.einsum("cw,cwde->cde", shares, parts[experts]),
        }

    def owner(self, cluster: Tensor, progress: float) -> Tensor:
        """Each cluster has a map of its own."""
        return cluster

    def draw(self, world: World, generator: torch.Generator, shape: tuple[int, int, int], progress: float) -> Batch:
        batch = super().draw(world, generator, shape, progress)
        return batch._replace(experts=world["experts"][batch.cluster], shares=world["shares"][batch.cluster])


class Fine(Parts):
    name = "fine"
    asks = "Can it choose 4 of 64 small experts?"
    formula = "as clusters with 64 clusters; y = 1/4 sum of 4 of 64 parts B_j x, of rank 8, the cluster's own choice"
    floor = "0: a small expert of 16 hidden units can be one part"
    why = "Fine-grained experts: what makes combinations possible also makes the choice hard."
    number, amplitude = 64, 6.0
    hidden, experts, top_k = 16, 64, 4

    def shares(self, seed: int) -> Tensor:
        return torch.full((self.number, 4), 0.25)

    def parts(self, generator: torch.Generator) -> Tensor:
        first = torch.randn(self.experts, self.dim, 8, generator=generator)
        second = torch.randn(self.experts, 8, self.dim, generator=generator)
        maps: Tensor = torch.bmm(first, second) * (2 / (8 * self.dim) ** 0.5)
        return maps


class Amount(Parts):
    name = "amount"
    asks = "Does the router give each token as many experts as it needs?"
    formula = (
        "as clusters with 16 clusters; a cluster needs m of 8 parts, m = 1, 2, 3, 4 for 7, 4, 3, 2 of the clusters "
        "(2 on average): y = mean over its parts of B_j x. A router that takes more than 2.1 experts a token is "
        "judged with its k lowered until it does not"
    )
    floor = "0: with the true parts and equal weights"
    why = "Adaptive k (top-p, relu, dynmoe, nulls) claims the same quality at less cost, or more at the same."
    number = 16
    top_k, lowers_k = 2, True

    def shares(self, seed: int) -> Tensor:
        sizes = torch.tensor([1] * 7 + [2] * 4 + [3] * 3 + [4] * 2)[:, None]
        return (torch.arange(4) < sizes) / sizes


class AnyK(Parts):
    name = "any-k"
    asks = "Trained with four experts a token, what does the router do with one, two and eight?"
    formula = (
        "as clusters with 16 clusters; y = sum_j a_j B_j x over 4 of 8 parts, the cluster's own choice, "
        "a = (8, 4, 2, 1) / 15; centres lie in 16 dimensions, the parts read the other 16; judged at k = 1, 2, 4 and 8"
    )
    why = "HyperRouter's and SMoE-Dropout's claim: a network that is right at every k."
    measure = "mean over k = 1, 2, 4, 8 of the share of variance that is not explained"
    number, top_k = 16, 4
    judged_at = (1, 2, 4, 8)
    weights = (8 / 15, 4 / 15, 2 / 15, 1 / 15)

    floor = (
        "mean over k of the variance of the parts that k experts leave out; no bound, since an expert can learn to "
        "make up for others"
    )

    def shares(self, seed: int) -> Tensor:
        return torch.tensor(self.weights).expand(self.number, -1).contiguous()

    def parts(self, generator: torch.Generator) -> Tensor:
        maps = super().parts(generator) * 2**0.5
        maps[:, : self.dim // 2] = 0
        return maps

    def centres(self, generator: torch.Generator) -> Tensor:
        return F.pad(directions(generator, self.number, self.dim // 2), (0, self.dim // 2))
