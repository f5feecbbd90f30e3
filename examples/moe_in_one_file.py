"""A whole mixture-of-experts layer in one file, in plain PyTorch. Read this first.

    python examples/moe_in_one_file.py                  # trains five routers on a toy task: about a minute
    python examples/moe_in_one_file.py xmoe+similarity  # or the one that you name

A mixture of experts (MoE) is a layer with E small networks, its experts. A router chooses k of them for each token:

    logits  = score(hidden)             how well each expert fits this token
    probs   = normalize(logits)         the same as numbers from 0 to 1
    probs   = mix(probs)                optional: tokens inform each other
    experts = the k largest of probs    the choice
    weights = probs of the choice       usually divided by their sum
    output  = sum of weight * expert(hidden)

Shapes: B sequences of T tokens, N = B * T tokens, E experts, k chosen experts, dim and hidden_dim widths.
The library pointsman does the same faster, with about thirty routers; a test holds this file equal to it.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Router(nn.Module):
    """The plain router, `smoe` (Shazeer et al. 2017): logits z = W h + b, probs = softmax(z).

    The routers below change one step each.
    """

    balance = 0.0  # weight of the balance loss
    balance_temperature = 1.0

    def __init__(self, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.dim, self.num_experts, self.top_k = dim, num_experts, top_k
        self.renormalize = True  # whether the k weights of a token are divided by their sum
        self.build()

    def build(self) -> None:
        """Makes the parameters."""
        self.weight = nn.Parameter(torch.randn(self.num_experts, self.dim) * 0.02)
        self.bias = nn.Parameter(torch.zeros(self.num_experts))

    def score(self, hidden: Tensor) -> Tensor:
        """[B, T, dim] -> logits [B, T, E]."""
        return F.linear(hidden, self.weight, self.bias)

    def normalize(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def rank(self, probs: Tensor) -> Tensor:
        """What the choice ranks experts by, [N, E]."""
        return probs

    def step_end(self) -> None:
        """Called after each optimizer step. State changes here and never in `forward`, which may run twice."""

    def forward(self, hidden: Tensor, mixer: nn.Module | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """[B, T, dim] -> experts [N, k], weights [N, k], losses."""
        logits = self.score(hidden)
        own = self.normalize(logits)
        probs = (own if mixer is None else mixer(own, hidden)).flatten(0, 1)
        experts = self.rank(probs).detach().topk(self.top_k, dim=-1).indices
        weights = probs.gather(-1, experts)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.training:
            self.count = torch.bincount(experts.flatten(), minlength=self.num_experts)
        losses = []
        if self.balance:
            losses.append(self.balance * balance_loss(logits.flatten(0, 1) / self.balance_temperature, experts))
        return experts, weights, losses


def balance_loss(logits: Tensor, experts: Tensor) -> Tensor:
    """E * sum_i f_i P_i (Fedus et al. 2022, Eq. 4): 1.0 where all experts get the same, E where one gets everything.

    f_i is the share of the assignments that expert i has, P_i its mean probability. The gradient goes through P.
    """
    num_experts = logits.shape[-1]
    share = torch.bincount(experts.flatten(), minlength=num_experts) / experts.numel()
    return num_experts * (share * logits.softmax(-1).mean(0)).sum()


class HyperRouter(Router):
    """HyperRouter (Do et al. 2023): W and b are generated from an embedding e by a fixed random network, and e trains.

    [W | b] = W2 relu(W1 e + b1) + b2 (Eq. 2), z = W h + b. Buffers never train.
    """

    def build(self) -> None:
        hidden, outputs = 256, self.num_experts * (self.dim + 1)
        self.embedding = nn.Parameter(torch.randn(self.dim))
        self.register_buffer("w1", torch.randn(hidden, self.dim) * 0.02)
        self.register_buffer("b1", torch.zeros(hidden))
        self.register_buffer("w2", torch.randn(outputs, hidden) * 0.02)
        self.register_buffer("b2", torch.zeros(outputs))

    def score(self, hidden: Tensor) -> Tensor:
        generated = F.linear(F.linear(self.embedding, self.w1, self.b1).relu(), self.w2, self.b2)
        generated = generated.view(self.num_experts, self.dim + 1)
        return F.linear(hidden, generated[:, :-1], generated[:, -1])


class CosineRouter(Router):
    """X-MoE (Chi et al. 2022): logits are cosines between token and expert on a sphere of few dimensions (Eq. 7).

    s_i = cos(W h, e_i), probs = softmax(s / tau) with a trained tau (Eq. 8). A token's norm then carries nothing.
    """

    balance, balance_temperature = 0.01, 0.3
    expert_norm = 0.1

    def build(self) -> None:
        width = max(2, self.num_experts // 2)
        self.renormalize = self.top_k > 1  # with one expert the weight is the probability
        self.projection = nn.Linear(self.dim, width, bias=False)
        self.expert_embeddings = nn.Parameter(
            F.normalize(torch.randn(self.num_experts, width), dim=-1) * self.expert_norm
        )
        self.temperature = nn.Parameter(torch.tensor(self.balance_temperature))

    def score(self, hidden: Tensor) -> Tensor:
        tokens = F.normalize(self.projection(hidden), dim=-1, eps=1e-4)
        return tokens @ F.normalize(self.expert_embeddings, dim=-1, eps=1e-4).T

    def normalize(self, logits: Tensor) -> Tensor:
        return (logits / self.temperature.clamp_min(1e-4)).softmax(-1)

    @torch.no_grad()
    def step_end(self) -> None:
        self.expert_embeddings.copy_(F.normalize(self.expert_embeddings, dim=-1) * self.expert_norm)
        self.temperature.clamp_(min=1e-4)


class LossFreeRouter(Router):
    """Loss-free balancing (Wang et al. 2024; DeepSeek-V3): a bias for each expert changes the choice, not the weights.

    After each step the bias of an expert with too few tokens rises by `rate`, that of one with too many falls.
    """

    rate = 1e-3

    def build(self) -> None:
        self.weight = nn.Parameter(torch.randn(self.num_experts, self.dim) * 0.02)
        self.register_buffer("bias", torch.zeros(self.num_experts))

    def score(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def normalize(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def rank(self, probs: Tensor) -> Tensor:
        return probs + self.bias

    @torch.no_grad()
    def step_end(self) -> None:
        mean = self.count.sum() / self.num_experts
        self.bias += self.rate * torch.sign(mean - self.count).to(self.bias.dtype)


class SimilarityMixer(nn.Module):
    """Similarity-Inform (Nguyen et al. 2025): a token's probs become a mean over the tokens that are like it.

    p_i = sum_j softmax_j(u_i . u_j / tau) e_j with u = h / |h|, over the token itself and earlier ones (causal).
    The paper writes u without saying how it is scaled, and tau = 1; unit vectors and 0.1 are this library's choice.
    """

    tau = 0.1

    def forward(self, probs: Tensor, hidden: Tensor) -> Tensor:
        """[B, T, E], [B, T, dim] -> [B, T, E]."""
        unit = F.normalize(hidden, dim=-1)
        likeness = unit @ unit.transpose(1, 2) / self.tau
        later = torch.ones(likeness.shape[1:], dtype=torch.bool, device=likeness.device).triu(1)
        return likeness.masked_fill(later, -torch.inf).softmax(-1) @ probs


ROUTERS = {"smoe": Router, "hyperrouter": HyperRouter, "xmoe": CosineRouter, "loss-free": LossFreeRouter}


class MoE(nn.Module):
    """y = sum over the chosen experts of weight * expert(h), expert(h) = W_out relu(W_in h + b_in) + b_out.

    Args:
        router: a name of `ROUTERS`, with "+similarity" for the mixer.
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, top_k: int = 2, router: str = "smoe") -> None:
        super().__init__()
        name, _, mixer = router.partition("+")
        self.router = ROUTERS[name](dim, num_experts, top_k)
        self.mixer = SimilarityMixer() if mixer == "similarity" else None
        self.w_in = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) / math.sqrt(dim))
        self.b_in = nn.Parameter(torch.zeros(num_experts, hidden_dim))
        self.w_out = nn.Parameter(torch.randn(num_experts, dim, hidden_dim) / math.sqrt(hidden_dim))
        self.b_out = nn.Parameter(torch.zeros(num_experts, dim))
        self.losses: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, dim] -> [B, T, dim]."""
        experts, weights, self.losses = self.router(hidden, self.mixer)
        rows = hidden.flatten(0, 1)
        output = torch.zeros_like(rows)
        for expert in range(len(self.w_in)):
            token, place = (experts == expert).nonzero(as_tuple=True)  # the tokens that chose it, and as which choice
            inner = F.linear(rows[token], self.w_in[expert], self.b_in[expert]).relu()
            result = F.linear(inner, self.w_out[expert], self.b_out[expert])
            output = output.index_add(0, token, result * weights[token, place, None])
        return output.view_as(hidden)


def add_losses(loss: Tensor, model: nn.Module) -> Tensor:
    """Adds the routers' losses of the last forward to the main loss."""
    for module in model.modules():
        if isinstance(module, MoE):
            loss, module.losses = loss + sum(module.losses), []
    return loss


def step_end(model: nn.Module) -> None:
    """Call it after each optimizer step."""
    for module in model.modules():
        if isinstance(module, Router):
            module.step_end()


def set_top_k(model: nn.Module, k: int) -> None:
    """Any k, at any time: nothing in a router depends on it."""
    for module in model.modules():
        if isinstance(module, Router):
            module.top_k = k


class Toy:
    """Eight kinds of tokens, each with its own linear map as the target. One expert can learn one map, so the best
    routing is known: one expert for each kind."""

    def __init__(self, dim: int = 32, kinds: int = 8) -> None:
        draw = torch.Generator().manual_seed(0)
        self.centres = 5 * F.normalize(torch.randn(kinds, dim, generator=draw), dim=-1)
        self.maps = torch.randn(kinds, dim, dim, generator=draw) / math.sqrt(dim)

    def batch(self, tokens: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs [4, tokens / 4, dim], targets of the same shape."""
        kind = torch.randint(len(self.centres), (tokens,), generator=draw)
        inputs = self.centres[kind] + torch.randn(tokens, self.centres.shape[1], generator=draw)
        targets = torch.einsum("nd,nde->ne", inputs, self.maps[kind])
        return inputs.view(4, tokens // 4, -1), targets.view(4, tokens // 4, -1)


def train(router: str, steps: int = 800, top_k: int = 2) -> dict[int, float]:
    """Trains one layer on the toy task. Returns k -> share of the targets' variance that is left unexplained."""
    torch.manual_seed(0)
    task, draw = Toy(), torch.Generator().manual_seed(1)
    model = MoE(32, 64, 8, top_k, router)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        inputs, targets = task.batch(256, draw)
        loss = add_losses(F.mse_loss(model(inputs), targets), model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        step_end(model)
    inputs, targets = task.batch(4096, draw)
    unexplained = {}
    for k in (1, 2, 8):
        set_top_k(model.eval(), k)
        with torch.no_grad():
            unexplained[k] = (F.mse_loss(model(inputs), targets) / targets.var()).item()
    return unexplained


if __name__ == "__main__":
    print("share of the variance left unexplained   k = 1   k = 2   k = 8")
    for name in sys.argv[1:] or (*ROUTERS, "smoe+similarity"):
        print(f"{name:38}" + "".join(f"{value:8.3f}" for value in train(name).values()), flush=True)
