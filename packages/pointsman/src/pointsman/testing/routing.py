"""The contract of a router on its own: what a Routing holds, precision, padding, state. One function a promise.

Each check takes a `Case` and raises AssertionError; the first line of its docstring is the promise.
"""

import warnings
from collections.abc import Callable

import torch

from pointsman.control import set_top_k
from pointsman.routers.frame.router import Router
from pointsman.routing import Routing
from pointsman.testing.case import Case, context_for, declared, drops, expect, expect_close, expect_equal, route


def any_width(router: Router, routing: Routing) -> bool:
    """Whether a token may have more than k experts: experts choose tokens, or k is a mean."""
    return not routing.requested or (router.ragged and routing.experts.shape[-1] == router.num_experts)


def shapes_and_sums(case: Case) -> None:
    """At every k, experts and weights are [tokens, k], probs and logits [tokens, E]; no token has an expert twice.

    Nothing is NaN, a token has no more experts on average than k, or than `Selector.cost` says, and the scores are what
    the normalizer says (`increasing`, `gives`); no stage changes them in place.
    """
    router, hidden, tokens = case.router().eval(), case.hidden(), case.batch * case.length
    hidden[0, 0] = 0  # no direction, and equal scores
    for k in range(case.num_experts if router.fixed_k else 1, case.num_experts + 1):
        set_top_k(router, k)
        routing = route(router, hidden)
        chosen = k if not any_width(router, routing) else routing.experts.shape[-1]
        every = case.num_experts + len(router.virtual)
        for name, width in (("experts", chosen), ("weights", chosen), ("probs", every), ("logits", every)):
            shape = list(getattr(routing, name).shape)
            expect(shape == [tokens, width], f"k={k}: {name} must be {[tokens, width]}, got {shape}")
        expect(routing.experts.dtype == torch.int64, f"k={k}: experts must be int64, got {routing.experts.dtype}")
        least, most = int(routing.experts.min()), int(routing.experts.max())
        expect(most < case.num_experts, f"k={k}: expert {most} of {case.num_experts}")
        expect(least >= (-1 if drops(router) or not routing.requested else 0), f"k={k}: expert {least}, not ragged")
        for row in routing.experts:
            taken = row[row >= 0]
            expect(taken.unique().numel() == taken.numel(), f"k={k}: an expert twice at one token: {row.tolist()}")
        mean, rows = int((routing.experts >= 0).sum()) / tokens, router.select.cost(case.batch, tokens, k, case.dim)[0]
        cap = max(k, rows / tokens) + case.num_experts / case.length  # experts may round their share of tokens up
        expect(not routing.requested or mean <= cap, f"k={k}: {mean:.3g} experts a token; Selector.cost must say so")
        for name, one in [("logits", routing.logits), *routing.losses.items()]:
            expect(not bool(one.isnan().any()), f"k={k}: {name}: NaN")
        expect(routing.weights.isfinite().all(), f"k={k}: weights: NaN or infinite")
        expect(bool((routing.probs >= 0).all()), f"k={k}: a probability below 0, or NaN")
        scores, gives = routing.probs if routing.unmixed is None else routing.unmixed, router.normalize.gives
        if not router.normalize.stochastic:
            again = router.normalize(routing.logits.view(case.batch, case.length, -1)).flatten(0, 1)
            expect_close(
                again, scores, f"k={k}: a stage changes logits or probabilities in place; others read them, too"
            )
        fall = scores.gather(-1, routing.logits.argsort(-1)).diff(dim=-1).amin()
        expect(fall > -1e-5 or not router.normalize.increasing, "`increasing`, but a larger logit has a smaller score")
        expect(
            scores.amax() < 1 + 1e-5 or "share" not in gives, f"k={k}: a score above 1: the normalizer gives no share"
        )
        if "distribution" in gives:
            expect_close(routing.probs.sum(-1), torch.ones(tokens), f"k={k}: the sum of probs")
        if getattr(router.select, "renormalize", False) and not drops(router):
            total = torch.full((tokens,), router.scale)
            expect_close(routing.weights.sum(-1), total, f"k={k}: the sum of renormalised weights")


def k_of_all_experts(case: Case) -> None:
    """With k = E every token goes to every expert."""
    router = case.router(top_k=case.num_experts).eval()
    set_top_k(router, case.num_experts)
    if drops(router):
        return
    experts = route(router, case.hidden()).experts.sort(-1).values
    expect_equal(experts, torch.arange(case.num_experts).expand_as(experts), "an expert is missing")


def precision(case: Case) -> None:
    """Logits, probs and weights are float32 for bf16, half and float32, and float64 for float64."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        router = case.router().to(dtype).eval()
        routing = route(router, case.hidden().to(dtype))
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        for name in ("logits", "probs", "weights"):
            found = getattr(routing, name).dtype
            expect(found == expected, f"a router in {dtype}: {name} must be {expected}, got {found}")
        if dtype in (torch.bfloat16, torch.float16):
            for name, buffer in router.named_buffers():
                kept = not buffer.is_floating_point() or buffer.dtype == torch.float32
                expect(kept, f"a router in {dtype}: the buffer {name} must stay float32, got {buffer.dtype}")


def half_precision_input(case: Case) -> None:
    """bf16 and half hidden states give the logits and the gradients of the same values in float32."""
    for dtype in (torch.bfloat16, torch.float16):
        router = case.router()
        torch.default_generator.manual_seed(0)
        low = torch.randn(2, 150, case.dim).to(dtype).requires_grad_()
        high = low.detach().float().requires_grad_()
        context = context_for(router, high.detach())
        results = []
        for hidden in (low, high):
            torch.default_generator.manual_seed(3)
            logits = router(hidden, context).logits
            wanted = [hidden, *(parameter for parameter in router.parameters() if parameter.requires_grad)]
            gradient = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
            gradients = torch.autograd.grad(logits, wanted, gradient, allow_unused=True) if logits.requires_grad else ()
            results.append([logits.detach(), *gradients])
        for one, other in zip(*results, strict=True):
            expect((one is None) == (other is None), f"{dtype}: a gradient that only one of the two has")
            if one is not None and other is not None:
                rtol = 1e-2 if one.dtype == dtype else 1e-5
                expect_close(one, other.to(one.dtype), f"{dtype}", rtol=rtol, atol=1e-4)


def autocast(case: Case) -> None:
    """Autocast changes neither experts nor weights."""
    router, hidden = case.router().eval(), case.hidden()
    context = context_for(router, hidden)
    torch.default_generator.manual_seed(3)
    plain = router(hidden, context)
    torch.default_generator.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = router(hidden, context)
    expect_equal(plain.experts, cast.experts, "experts under autocast")
    expect_equal(plain.weights, cast.weights, "weights under autocast")


def odd_sizes(case: Case) -> None:
    """One token, one sequence, no token and no sequence are routed."""
    for batch, length in ((1, 1), (1, 7), (5, 1), (2, 33), (2, 0), (0, 5)):
        router = case.router()
        routing = route(router, torch.randn(batch, length, case.dim))
        shape = list(routing.experts.shape)
        wanted = [batch * length, shape[-1] if any_width(router, routing) else router.top_k]
        expect(shape == wanted, f"{batch} sequences of {length} tokens: experts must be {wanted}, got {shape}")


def one_sequence(case: Case) -> None:
    """[tokens, dim] is routed as one sequence [1, tokens, dim]."""
    router, hidden = case.router().eval(), case.hidden()
    if "attention" in router.needs or "token_ids" in router.needs:  # which have a batch dimension
        return
    torch.default_generator.manual_seed(3)
    flat = router(hidden[0])
    expect_equal(flat.experts, route(router, hidden[:1], below=None).experts, "experts")


def padding(case: Case) -> None:
    """Padding at either end has expert -1 and weight 0, and changes no other token's routing and no loss."""
    hidden, mask = case.hidden(), torch.ones(case.batch, case.length, dtype=torch.bool)
    mask[0, 8:] = mask[2, 5:] = False
    for mode, router in case.modes():
        router.balance, router.z_loss = 0.01, 0.001
        mask[1, :3] = "attention" in router.needs  # the trace of which attends to all tokens before
        torch.default_generator.manual_seed(0)
        other = torch.where(mask[..., None], hidden, 5 * torch.randn_like(hidden))
        left, right = (route(router, given, padding_mask=mask) for given in (hidden, other))  # with equal draws
        real = mask.reshape(-1)
        expect(bool((left.experts[~real] == -1).all()), "a padding token has an expert")
        expect(bool((left.weights[~real] == 0).all()), "a padding token has a weight")
        expect_equal(left.experts, right.experts, f"experts in {mode} after padding changed")
        expect_close(left.weights, right.weights, f"weights in {mode} after padding changed")
        for name, loss in left.losses.items():
            expect_close(right.losses[name], loss, f"the loss {name!r} in {mode} after padding changed")
        if not declared(router, "stochastic"):
            padded, alone = route(router, hidden[:1], padding_mask=mask[:1]), route(router, hidden[:1, :8])
            for found in (padded, left) if declared(router, "batch_invariant") else (padded,):
                expect_close(found.weights[:8], alone.weights, f"weights in {mode} with padding and without")
            for name, loss in alone.losses.items():
                expect_close(padded.losses[name], loss, f"the loss {name!r} in {mode} with padding and without")


def state_dict(case: Case) -> None:
    """A router with the state_dict of another routes as that one does."""
    router, hidden = case.router().eval(), case.hidden()
    other = case.router(seed=2).eval()  # what is neither parameter nor buffer then differs
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor))
        route(other, hidden)  # fills whatever it caches
        other.load_state_dict(router.state_dict())
        left, right = route(router, hidden), route(other, hidden)
    expect_equal(left.experts, right.experts, "experts")
    expect_equal(left.weights, right.weights, "weights")


def compiles(case: Case) -> None:
    """torch.compile changes no routing."""
    router, hidden = case.router().eval(), case.hidden()
    if router.stochastic:
        return
    context = context_for(router, hidden)
    torch._dynamo.reset()
    with warnings.catch_warnings():  # the compiler's own, where it breaks the graph
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        compiled = torch.compile(router, backend="aot_eager")(hidden, context)
    plain = router(hidden, context)
    expect_equal(plain.experts, compiled.experts, "experts")
    expect_close(plain.weights, compiled.weights, "weights")


def expect_refusal(call: Callable[[], object], mention: str, what: str) -> None:
    """The call must raise a ValueError whose message contains `mention`."""
    try:
        call()
    except ValueError as error:
        expect(mention in str(error), f"{what}: the error must mention {mention!r}, got {str(error)!r}")
        return
    raise AssertionError(f"{what}: no ValueError")


def bad_input(case: Case) -> None:
    """Hidden states of another width, and k outside 1 to E, are refused with the allowed values."""
    router, allowed = case.router(), f"from 1 to {case.num_experts}"
    expect_refusal(lambda: router(torch.randn(2, 3, case.dim + 1)), str(case.dim), f"width {case.dim + 1}")
    for k in (0, case.num_experts + 1, 2.0):
        expect_refusal(lambda k=k: set_top_k(router, k), allowed, f"k={k}")  # type: ignore[misc]
    if router.fixed_k:
        expect_refusal(lambda: set_top_k(router, 1), router.spec, "k=1 of a router that always takes all experts")
