"""Similarity- and Attention-Inform against the paper's equations in float64: explicit matrices, explicit Gaussians."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pointsman import AttentionTrace, MoE, RoutingContext, build_router
from pointsman._errors import RunError
from pointsman.ops.relative import RelativeBias
from pointsman.parallel import Layout
from pointsman.parallel.shard import check_layers
from pointsman.routers.mutual.token_mixer import TokenMixer
from pointsman.routing import RouterState

B, T, M, DIM, EXPERTS, HEADS, WIDTH = 2, 7, 4, 6, 5, 3, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def mixer(spec: str) -> TokenMixer:
    mix = build_router(f"smoe+{spec}", dim=DIM, num_experts=EXPERTS).double().mix
    assert isinstance(mix, TokenMixer)
    for name in ("tau", "sigma"):  # what float32 has rounded
        if f"{name}=" in spec:
            getattr(mix, name).fill_(float(spec.split(f"{name}=")[1].split(":")[0]))
    return mix


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(-1)


class Case:
    """Leaves, a trace of them, and who informs whom, written down pair by pair."""

    def __init__(
        self, causal: bool, memory: bool, padded: bool, bias: str = "none", side_by_side: bool = False
    ) -> None:
        self.causal, past = causal, M if memory else 0
        keys = past + T
        self.hidden = draw(B, T, DIM).requires_grad_()
        self.probs = torch.softmax(draw(B, T, EXPERTS, seed=1), -1).requires_grad_()
        self.query, self.key, self.value = (
            draw(B, HEADS, n, WIDTH, seed=i).requires_grad_() for i, n in enumerate((T, keys, keys))
        )
        self.out_weight = (draw(HEADS, WIDTH, DIM) / 3).requires_grad_()
        self.heads_out = draw(B, T, HEADS * WIDTH, seed=4).requires_grad_()
        self.output = self.heads_out @ self.out_weight.reshape(-1, DIM)
        self.relative = [
            draw(*shape, seed=6).requires_grad_() for shape in ((HEADS, keys, WIDTH), (HEADS, WIDTH), (HEADS, WIDTH))
        ]
        self.relative = self.relative if bias != "none" else []
        self.scale = WIDTH**-0.5
        function = RelativeBias(self.query, self.key, *self.relative, self.scale) if self.relative else None
        if bias == "opaque" and function is not None:
            native = function
            function = lambda start, stop: native(start, stop)  # noqa: E731
        self.trace = AttentionTrace(
            self.query, self.key, self.value, self.out_weight, self.output, self.scale, function,
            self.heads_out if side_by_side else None,
        )  # fmt: skip
        self.past_probs = torch.softmax(draw(B, past, EXPERTS, seed=8), -1)
        self.past_hidden = draw(B, past, DIM, seed=9)
        self.real = torch.ones(B, keys, dtype=torch.bool)
        if padded:
            self.real[0, :2], self.real[1, -3:] = False, False
        carry: RouterState = {"probs": self.past_probs, "tokens": self.past_hidden, "real": self.real[:, :past]}
        self.context = RoutingContext(causal, self.real[:, past:], None, self.trace, carry if memory else None)

    @property
    def everyone(self) -> Tensor:
        return torch.cat([self.past_probs, self.probs], 1)

    def informs(self, b: int, i: int, j: int, lower: bool) -> bool:
        own = self.everyone.shape[1] - T + i
        if j == own:
            return True
        if (self.causal and j > own) or not self.real[b, j] or not self.real[b, own]:
            return False
        return not lower or bool(entropy(self.everyone[b, j]) <= entropy(self.everyone[b, own]))

    def attention(self, b: int, h: int, i: int, lower: bool) -> Tensor:
        """A_h[i, :] [S]."""
        keys = self.key.shape[2]
        scores = []
        for j in range(keys):
            score = self.query[b, h, i] @ self.key[b, h, j]
            if self.relative:
                r, u, w = self.relative
                distance = keys - T + i - j
                score = score + u[h] @ self.key[b, h, j]
                if distance >= 0:
                    score = score + (self.query[b, h, i] + w[h]) @ r[h, keys - 1 - distance]
            scores.append(score * self.scale if self.informs(b, i, j, lower) else score.new_tensor(-torch.inf))
        return torch.softmax(torch.stack(scores), 0)

    factor = HEADS

    def gaussian(self, b: int, h: int, i: int, j: int, sigma: float) -> Tensor:
        """N(u_i | W_h v_j, sigma^2 I)."""
        mean = self.factor * self.value[b, h, j] @ self.out_weight[h]
        distance = (self.output[b, i] - mean).square().sum()
        return torch.exp(-distance / (2 * sigma**2)) / (2 * math.pi * sigma**2) ** (DIM / 2)


def similarity(case: Case, u: Tensor, weight: Tensor, tau: float, lower: bool = False) -> Tensor:
    """Definition 1; u [B, S, DIM]."""
    out = []
    for b in range(B):
        for i in range(T):
            own = u.shape[1] - T + i
            allowed = [j for j in range(u.shape[1]) if case.informs(b, i, j, lower)]
            s = torch.softmax(torch.stack([u[b, own] @ weight @ u[b, j] / tau for j in allowed]), 0)
            out.append(sum(s[n] * case.everyone[b, j] for n, j in enumerate(allowed)))
    return torch.stack(out).view(B, T, EXPERTS)


def posterior(case: Case, b: int, h: int, i: int, sigma: float, lower: bool) -> tuple[Tensor, Tensor]:
    """A'_h[i, :] [S], and the evidence sum_j A_h[i, j] N_j."""
    prior = case.attention(b, h, i, lower)
    joint = torch.stack([prior[j] * case.gaussian(b, h, i, j, sigma) for j in range(len(prior))])
    return joint / joint.sum(), joint.sum()


def attention(case: Case, sigma: float, head: list[int] | None, lower: bool = False) -> Tensor:
    """Definition 2 with a head for each sequence, or Lemma 1 with all of them (the prior over heads is 1/H)."""
    out = []
    for b in range(B):
        for i in range(T):
            heads = range(HEADS) if head is None else [head[b]]
            found = [posterior(case, b, h, i, sigma, lower) for h in heads]
            evidence = torch.stack([z / HEADS for _, z in found])
            share = evidence / evidence.sum()
            out.append(sum(share[n] * (a @ case.everyone[b]) for n, (a, _) in enumerate(found)))
    return torch.stack(out).view(B, T, EXPERTS)


def assert_same(got: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(got, expected)
    upper = draw(*got.shape, seed=3)
    mine, reference = (torch.autograd.grad(side, leaves, upper, retain_graph=True) for side in (got, expected))
    for one, other in zip(mine, reference, strict=True):
        torch.testing.assert_close(one, other)


CASES = [(True, False, False), (True, True, True), (False, False, True), (False, True, False), (True, True, False)]


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize(("causal", "memory", "padded"), CASES)
@pytest.mark.parametrize("source", ["unit:tau=0.1", "input", "input:tau=2.5:learned=true", "attention"])
def test_similarity_is_the_papers(source: str, causal: bool, memory: bool, padded: bool, lower: bool) -> None:
    case = Case(causal, memory, padded)
    mix = mixer(f"similarity:source={source}:neighbours={'lower-entropy' if lower else 'all'}")
    tau = {"unit": 0.1, "attention": 1.0}.get(source.split(":")[0], 2.5 if "2.5" in source else 1.0)
    tokens = case.output if source == "attention" else case.hidden
    u = torch.cat([case.past_hidden, tokens], 1)
    weight, leaves = (
        torch.eye(DIM, dtype=torch.float64),
        [case.probs, case.out_weight if source == "attention" else case.hidden],
    )
    if source.startswith("unit"):
        u = u / u.square().sum(-1, keepdim=True).sqrt()
    if "learned" in source:
        assert mix.weight is not None
        assert torch.equal(mix.weight, weight)
        with torch.no_grad():
            mix.weight.copy_(draw(DIM, DIM) / 3)
        weight = mix.weight
        leaves.append(mix.weight)
    got, carry, _ = mix(case.probs, case.hidden, case.context)
    assert_same(got, similarity(case, u, weight, tau, lower), leaves)
    assert carry["probs"].shape == (B, T + M * memory, EXPERTS)
    assert not any(tensor.requires_grad for tensor in carry.values())


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("bias", ["none", "relative", "opaque"])
@pytest.mark.parametrize(("causal", "memory", "padded"), CASES)
@pytest.mark.parametrize("heads", ["lowest-entropy", "lowest-entropy-sequence", "all"])
def test_attention_is_the_papers(heads: str, causal: bool, memory: bool, padded: bool, bias: str, lower: bool) -> None:
    if not causal and bias != "none":
        pytest.skip("relative attention is causal")
    case = Case(causal, memory, padded, bias, side_by_side=bias == "relative")
    mix = mixer(f"attention:sigma=1.3:heads={heads}:neighbours={'lower-entropy' if lower else 'all'}")
    head: list[int] | None = None
    if heads == "lowest-entropy":
        mix.head_entropy = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
        head = [1] * B
    elif heads == "lowest-entropy-sequence":
        mean = []
        for b in range(B):
            rows = [i for i in range(T) if case.real[b, case.real.shape[1] - T + i]]
            over = [
                torch.stack([torch.special.entr(case.attention(b, h, i, False).detach()).sum() for i in rows])
                for h in range(HEADS)
            ]
            mean.append([float(values.mean()) for values in over])
        head = [min(range(HEADS), key=lambda h, b=b: mean[b][h]) for b in range(B)]
        assert not mix.causal
    got, carry, _ = mix(case.probs, case.hidden, case.context)
    leaves = [case.probs, case.query, case.key, case.value, case.out_weight, case.heads_out, *case.relative]
    assert_same(got, attention(case, 1.3, head, lower), leaves)
    assert set(carry) == {"probs", "real"}


@pytest.mark.parametrize(
    "spec", ["similarity", "similarity:source=input:tau=3", "attention", "attention:heads=all", "uniform"]
)
def test_rows_sum_to_one_and_neighbours_are_those_of_the_explicit_matrix(spec: str) -> None:
    case = Case(True, True, True, "relative")
    mix = mixer(spec)
    ones, past_ones = torch.ones(B, T, 1, dtype=torch.float64), torch.ones(B, M, 1, dtype=torch.float64)
    context = replace(case.context, past={**case.context.past, "probs": past_ones})
    torch.testing.assert_close(mix(ones, case.hidden, context)[0], ones)
    # mixing one-hot scores of a token each shows S itself
    keys = torch.eye(M + T, dtype=torch.float64).expand(B, -1, -1)
    context = replace(case.context, past={**case.context.past, "probs": keys[:, :M]})
    s = mix(keys[:, M:], case.hidden, context)[0]
    own, effective = mix.neighbours(case.probs, case.hidden, case.context)
    torch.testing.assert_close(own, torch.stack([s[:, i, M + i] for i in range(T)], 1))
    torch.testing.assert_close(effective, torch.special.entr(s).sum(-1).exp())
    mix.strength = 0.25
    own, effective = mix.neighbours(case.probs, case.hidden, case.context)
    s = 0.25 * s + 0.75 * keys[:, M:]
    torch.testing.assert_close(own, torch.stack([s[:, i, M + i] for i in range(T)], 1))
    torch.testing.assert_close(effective, torch.special.entr(s).sum(-1).exp())


@pytest.mark.parametrize("name", ["similarity", "attention"])
def test_strength_interpolates_and_zero_is_the_identity(name: str) -> None:
    case = Case(True, True, False)
    full, part, none = (
        mixer(f"{name}:strength={strength}")(case.probs, case.hidden, case.context)[0] for strength in (1, 0.3, 0)
    )
    assert torch.equal(none, case.probs)
    torch.testing.assert_close(part, 0.7 * case.probs + 0.3 * full)
    assert not torch.allclose(full, case.probs)


@pytest.mark.parametrize("name", ["similarity:source=input:tau=", "attention:heads=all:sigma="])
def test_proposition_1(name: str) -> None:
    """H(p_i) <= sum_j s_ij H(e_j) + H(s_i) (18); with neighbours of lower entropy at most H(e_i), tau or sigma -> 0."""
    case = Case(True, False, False)
    before = entropy(case.probs)
    previous = torch.full_like(before, torch.inf)
    identity = torch.eye(T, dtype=torch.float64).expand(B, -1, -1)
    for value in (10.0, 1.0, 0.1, 0.01, 0.001):
        bare = mixer(f"{name}{value}")
        s = bare(identity, case.hidden, case.context)[0]
        mixed = bare(case.probs, case.hidden, case.context)[0]
        bound = torch.einsum("bts,bs->bt", s, before) + torch.special.entr(s).sum(-1)
        assert (entropy(mixed) <= bound + 1e-9).all()
        assert (torch.special.entr(s).sum(-1) <= previous + 1e-6).all()
        previous = torch.special.entr(s).sum(-1)
    lower = mixer(f"{name}0.001:neighbours=lower-entropy")(case.probs, case.hidden, case.context)[0]
    assert (entropy(lower) <= before + 1e-6).all()
    assert (entropy(lower) < before - 1e-3).any()
    # without the restriction it need not fall: some sure token is informed by an unsure one
    assert (entropy(mixed) > before + 1e-3).any()


def test_equally_sure_tokens_inform_each_other() -> None:
    case = Case(True, False, False)
    probs = case.probs[:, :1].expand(B, T, EXPERTS)
    own, effective = mixer("similarity:neighbours=lower-entropy:tau=100")(probs, case.hidden, case.context)[0], None
    torch.testing.assert_close(own, probs)
    own, effective = mixer("similarity:neighbours=lower-entropy:tau=100").neighbours(probs, case.hidden, case.context)
    torch.testing.assert_close(effective, torch.arange(1.0, T + 1).double().expand(B, T), atol=1e-2, rtol=0)


@pytest.mark.parametrize("name", ["similarity", "attention:heads=all"])
def test_padding_neither_informs_nor_is_informed(name: str) -> None:
    case = Case(True, True, True)
    mix = mixer(name)
    before = mix(case.probs, case.hidden, case.context)[0]
    fake = ~case.real[..., None]
    hidden = torch.where(fake[:, M:], draw(B, T, DIM, seed=20), case.hidden)
    probs = torch.where(fake[:, M:], torch.softmax(draw(B, T, EXPERTS, seed=21), -1), case.probs)
    key, value = (torch.where(fake[:, None], draw(*x.shape, seed=22), x) for x in (case.key, case.value))
    past = {
        "probs": torch.where(fake[:, :M], draw(B, M, EXPERTS, seed=23), case.past_probs),
        "tokens": torch.where(fake[:, :M], draw(B, M, DIM, seed=24), case.past_hidden),
        "real": case.real[:, :M],
    }
    context = replace(case.context, past=past, attention=replace(case.trace, key=key, value=value))
    after = mix(probs, hidden, context)[0]
    real = case.real[:, M:]
    torch.testing.assert_close(after[real], before[real])
    torch.testing.assert_close(after[~real], probs[~real])


def test_keys_without_scores_are_left_out() -> None:
    """A carry shorter than the attention's memory, or none; and one that is longer."""
    case = Case(True, True, False)
    mix = mixer("attention:heads=all")
    for carried in (0, 2):
        past = {"probs": case.past_probs[:, M - carried :]} if carried else None
        short = replace(case.trace, key=case.key[:, :, M - carried :], value=case.value[:, :, M - carried :])
        torch.testing.assert_close(
            mix(case.probs, case.hidden, replace(case.context, past=past))[0],
            mix(case.probs, case.hidden, replace(case.context, past=past, attention=short))[0],
        )
    longer = {"probs": torch.cat([draw(B, 3, EXPERTS), case.past_probs], 1)}
    torch.testing.assert_close(
        mix(case.probs, case.hidden, replace(case.context, past=longer))[0],
        mix(case.probs, case.hidden, case.context)[0],
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("similarity:tau=0", "tau=0"),
        ("attention:sigma=-1", "sigma=-1"),
        ("similarity:strength=2", "strength=2"),
        ("attention:heads=first", "lowest-entropy or lowest-entropy-sequence or all"),
        ("similarity:neighbours=none", "all or lower-entropy"),
        ("similarity:sorce=unit", "did you mean 'source'"),
    ],
)
def test_bad_options_are_named(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mixer(spec)


def test_what_does_not_fit_is_named() -> None:
    case = Case(True, True, False)
    router = build_router("attention", dim=DIM, num_experts=EXPERTS).double()
    with pytest.raises(ValueError, match=r"needs RoutingContext\.attention"):
        router(case.hidden)
    with pytest.raises(ValueError, match=r"needs RoutingContext\.attention"):
        build_router("similarity:source=attention", dim=DIM, num_experts=EXPERTS).double()(case.hidden)
    for mixer in ("attention", "similarity:source=attention", "shuffled:source=attention"):
        router = build_router(mixer, dim=DIM, num_experts=EXPERTS).double()
        with pytest.raises(ValueError, match="attention is of 2 x 7 tokens, the hidden states of 2 x 3"):
            router(case.hidden[:, :3], RoutingContext(attention=case.trace))
    with pytest.raises(ValueError, match="past is of 2 sequences, the input of 1"):
        build_router("similarity", dim=DIM, num_experts=EXPERTS).double()(
            case.hidden[:1], RoutingContext(past=case.context.past)
        )


def test_defaults_and_state_dict() -> None:
    assert mixer("similarity").source == "unit"
    for source, tau in (("unit", 0.1), ("input", 1.0), ("attention", 1.0)):
        assert mixer(f"similarity:source={source}").tau.item() == pytest.approx(tau)
    for options, sigma in (("", DIM**0.5), (":sigma=1", 1.0), (":sigma=3:relative=true", 3 * DIM**0.5)):
        mix = build_router(f"smoe+attention{options}", dim=DIM, num_experts=EXPERTS).mix
        assert mix.sigma.item() == pytest.approx(sigma)
    router = build_router("xmoe+attention", dim=DIM, num_experts=EXPERTS)
    assert set(router.mix.state_dict()) == {"sigma", "head_entropy", "head_steps"}
    assert set(build_router("similarity:learned=true", dim=DIM, num_experts=EXPERTS).mix.state_dict()) == {
        "tau",
        "weight",
    }


@pytest.mark.parametrize("heads", ["lowest-entropy", "all"])
def test_attention_without_the_factor_and_with_a_relative_sigma(heads: str) -> None:
    case = Case(True, True, False, "relative", side_by_side=True)
    case.factor = 1
    mix = mixer(f"attention:factor=one:relative=true:heads={heads}")
    sigma = math.sqrt(DIM)
    torch.testing.assert_close(mix.sigma, torch.tensor(sigma, dtype=torch.float64), rtol=1e-6, atol=0)
    mix.sigma.fill_(sigma)  # what float32 has rounded
    got, _, _ = mix(case.probs, case.hidden, case.context)
    leaves = [case.probs, case.query, case.key, case.value, case.out_weight, case.heads_out, *case.relative]
    assert_same(got, attention(case, sigma, None if heads == "all" else [0] * B, False), leaves)


@pytest.mark.parametrize(("causal", "memory", "padded"), CASES)
def test_the_controls_are_a_mean_and_the_similarities_of_the_next_sequence(
    causal: bool, memory: bool, padded: bool
) -> None:
    case = Case(causal, memory, padded)
    past = case.everyone.shape[1] - T
    expected = torch.stack([
        torch.stack([case.everyone[b, j] for j in range(past + T) if case.informs(b, i, j, False)]).mean(0)
        for b in range(B) for i in range(T)
    ]).view(B, T, EXPERTS)  # fmt: skip
    got, _, _ = mixer("uniform")(case.probs, case.hidden, case.context)
    assert_same(got, expected, [case.probs])
    u = torch.cat([case.past_hidden, case.hidden], 1)
    u = (u / u.square().sum(-1, keepdim=True).sqrt() * case.real[..., None]).roll(-1, 0)
    got, carry, _ = mixer("shuffled")(case.probs, case.hidden, case.context)
    identity = torch.eye(DIM, dtype=torch.float64)
    assert_same(got, similarity(case, u, identity, 0.1), [case.probs, case.hidden])
    assert torch.equal(carry["tokens"][:, past:], case.hidden.detach())


@pytest.mark.parametrize("bias", ["relative", "opaque"])
@pytest.mark.parametrize("biases", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", ["lowest-entropy", "lowest-entropy-sequence", "all"])
def test_attention_in_half_precision(heads: str, biases: torch.dtype, bias: str) -> None:
    """As autocast gives it; the biases may be parameters, which autocast leaves as they are."""
    case, half = Case(True, False, False, "relative"), torch.bfloat16
    query, key, value, output = (part.to(half) for part in (case.query, case.key, case.value, case.output))
    native = RelativeBias(query, key, case.relative[0].to(half), *(one.to(biases) for one in case.relative[1:]), 0.5)
    function = native if bias == "relative" else lambda *rows: native(*rows)
    trace = AttentionTrace(query, key, value, case.out_weight.float(), output, 0.5, function)
    mix = build_router(f"smoe+attention:heads={heads}", dim=DIM, num_experts=EXPERTS).mix
    context, probs = replace(case.context, attention=trace), case.probs.float()
    mixed = mix(probs, case.hidden.float(), context)[0]
    assert mixed.dtype == torch.float32
    mixed.sum().backward()
    assert all(one.grad is not None for one in case.relative)


def test_the_next_sequence_of_the_batch_must_not_be_another_ranks() -> None:
    layers = torch.nn.Sequential(MoE(DIM, 4, 4, router="smoe+shuffled"))
    with pytest.raises(RunError, match="trains in one process: the next sequence of the batch"):
        check_layers(layers, Layout(2))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda trace: {"key": trace.key[:, :1], "value": trace.value[:, :1]},
            r"key must be \[2, 3, S, 4\] with",
        ),
        (lambda trace: {"key": trace.key[:, :, 1:], "value": trace.value[:, :, 1:]}, "with S from 7, got"),
        (lambda trace: {"key": trace.key[:1], "value": trace.value[:1]}, "key must be"),
        (lambda trace: {"value": trace.value[:, :, 1:]}, r"value must be \[2, 3, 7, V\], got \[2, 3, 6, 4\]"),
        (lambda trace: {"query": trace.query.transpose(1, 2)}, r"query must be \[2, H, 7, D\], got \[2, 7, 3, 4\]"),
        (lambda trace: {"out_weight": trace.out_weight[:1]}, "out_weight must be"),
        (lambda trace: {"out_weight": trace.out_weight.flatten(0, 1)}, "out_weight must be"),
        (lambda trace: {"output": torch.cat([trace.output, trace.output], -1)}, r"output must be \[2, 7, 6\], got"),
    ],
)
@pytest.mark.parametrize("heads", ["lowest-entropy", "lowest-entropy-sequence", "all"])
def test_a_trace_whose_tensors_do_not_fit_is_refused(heads: str, change: object, told: str) -> None:
    """Keys shared by groups of heads, or too few, gave other scores in silence; the rest ended deep inside torch."""
    case = Case(True, False, False)
    assert callable(change)
    assert case.context.attention is not None
    context = replace(case.context, attention=replace(case.context.attention, **change(case.context.attention)))
    with pytest.raises(ValueError, match=rf"^AttentionTrace\..*{told}"):
        mixer(f"attention:heads={heads}")(case.probs, case.hidden, context)
