"""The parts of an audit that follow from what was recorded, and those that try something on the model.

What is tried are prunings and merges of several sizes, verified on held-out text beside random prunings, and at last
greedy generation on prompts with known answers, at every k.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.control import set_top_k
from pointsman.diagnostics.base import number
from pointsman.hf.gates import survey
from pointsman.hf.top_k import gate_top_k
from pointsman.ops.selection import members
from pointsman.traces import RoutingTrace
from pointsman_lab.checkpoints.audit.blocks import Blocks
from pointsman_lab.checkpoints.audit.result import TOLERANCE
from pointsman_lab.checkpoints.audit.serving import served, serving
from pointsman_lab.checkpoints.audit.trials import (
    Rows,
    halves,
    mean_of,
    measured,
    paired,
    predicts,
    schedules,
    super_experts,
    verdict,
)
from pointsman_lab.checkpoints.choosing import at_random, plan
from pointsman_lab.checkpoints.cutting import cut, cuttable
from pointsman_lab.checkpoints.text import Batches, device_of
from pointsman_lab.intervals import ratio
from pointsman_lab.traces.placement import cache, place, real_experts

TIMES = (1, 16, 128)
"""Numbers of choices that an expert should get from a text for calibration."""
LEAST_TOGETHER = 10  # tokens of a pair of experts, or choices of a token, that are named
TYPICAL = 8
DEVICES = 8
SIZES = (7 / 8, 3 / 4, 1 / 2)
METHODS = ("reap", "m-smoe")
RANDOM = 3
ANSWER_TOKENS = 256


def analysed(
    model: nn.Module, blocks: Blocks, trace: RoutingTrace, probes: Batches, quality: Sequence[Any], notes: list[str]
) -> dict[str, Any]:
    """All parts by name; `notes` gets why one is missing."""
    layers = list(trace.layers)
    every, reasons = survey(model)
    gates = [gate for gate in every if gate.layer in layers]
    known = [(row["top_k"], row["routers"].items()) for row in quality if row["top_k"]]
    loads = {k: {name: (k, of["load"]) for name, of in routers} for k, routers in known}
    found: dict[str, Any] = {
        "domains": {name: sum(block.read for block in blocks.of(name)) for name in blocks.domains},
        "divergence": blocks.divergences(layers),
        "specialists": blocks.specialists(layers),
        "coverage": blocks.coverage(layers, TIMES) if layers else [],
        "across": across(trace) if layers else [],
        "serving": {},
    }
    bare = [f"{type(g.block).__name__} has its experts as weights of its own" for g in gates if g.experts is g.block]
    if len(gates) == len(layers) and not bare:
        found["serving"] = serving(model, gates, loads)
    else:
        notes.append(f"cost to serve left out: {(reasons or bare or ['gates that are not found'])[0]}")
    found["super_experts"], found["schedules"], found["prunings"] = [], [], []
    if probes and any(row["loss"] for row in quality):  # without a loss nothing can be tried
        search, held_out = (half if predicts(half) else [] for half in halves(probes))
        trials: dict[str, tuple[str, Callable[[], list[dict[str, Any]]]]] = {
            "super_experts": ("super experts", lambda: super_experts(model, gates, search, held_out)),
            "schedules": ("k by layer", lambda: schedules(model, gates, loads, search, held_out, TOLERANCE)),
        }
        if len(gates) == len(every):
            trials["prunings"] = "experts that can go", lambda: prunings(model, search, held_out, TOLERANCE)
        for name, (what, tried) in trials.items():
            try:
                if not search or not held_out:
                    raise ValueError("the text is too short to be divided in two; read more of it")
                found[name] = tried()
            except (ValueError, torch.OutOfMemoryError) as error:
                notes.append(f"{what} left out: {str(error).removeprefix('compress: ')}")
        chosen = {one["kind"]: {name: loads[k][name] for name, k in one["ks"].items()} for one in found["schedules"]}
        costs = serving(model, gates, chosen)["rows"] if found["serving"] else []
        for one in found["schedules"]:
            one["serving"] = [row for row in costs if row["top_k"] == one["kind"]]
    experts = min(real_experts(trace).values(), default=0)
    if experts > 2 and trace.tokens > 1:
        found["placement"] = place(trace, min(DEVICES, experts), spare=min(DEVICES, experts), batch=256)
        found["cache"] = {"size": max(1, experts // 4), "layers": cache(trace, max(1, experts // 4))}
    return found


def typical(layers: Mapping[str, Mapping[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """The tokens that an expert takes more than others do: of its most frequent ones, those with the largest lift.

    {"layer", "expert", "tokens": [{"text", "count", "lift"}]}, at most `TYPICAL` tokens. Count: of the expert; lift:
    the share of the token's choices that are this expert's, over the expert's share of all choices.
    """
    found = []
    for layer, of in layers.items():
        load = of["load"]["share"]
        for expert, top in enumerate((of.get("specialisation") or {}).get("top") or ()):
            lifts = [
                [share / load[expert], one, count]
                for one, count, share in top
                if count >= LEAST_TOGETHER and share > load[expert]
            ]
            best = sorted(lifts, reverse=True)[:TYPICAL]
            told = [{"text": tokenizer.decode([one]), "count": count, "lift": lift} for lift, one, count in best]
            found.append({"layer": layer, "expert": expert, "tokens": told})
    return found


def across(trace: RoutingTrace) -> list[dict[str, Any]]:
    """What the experts of a layer say of the next layer's: mutual information, and pairs that go together.

    `bits`: of one choice in each layer, taken at random, less the expectation under independence. `pairs`: the three
    with the highest lift (joint tokens over those under independence) of those with at least ten joint tokens.
    """
    found = []
    for layers in pairwise(trace.layers):
        mine, its = (members(trace.experts[of].clamp_min(-1).long(), trace.num_experts[of]).double() for of in layers)
        joint = mine.T @ its
        lift = joint * trace.tokens / torch.outer(mine.sum(0), its.sum(0)).clamp_min(1)
        lift = torch.where(joint >= LEAST_TOGETHER, lift, 0.0)
        best = [divmod(at, lift.shape[1]) for at in lift.reshape(-1).topk(min(3, lift.numel())).indices.tolist()]
        p = joint / joint.sum().clamp_min(1)
        entropy = [float(torch.special.entr(each).sum()) for each in (p.sum(1), p.sum(0), p.reshape(-1))]
        used = [int((each > 0).sum()) for each in (p.sum(1), p.sum(0))]
        chance = (used[0] - 1) * (used[1] - 1) / (2 * max(1, trace.tokens))
        bits = max(0.0, entropy[0] + entropy[1] - entropy[2] - chance) / 0.6931471805599453
        pairs = [
            {"experts": [i, j], "tokens": int(joint[i, j]), "lift": number(lift[i, j])} for i, j in best if lift[i, j]
        ]
        found.append({"layers": list(layers), "bits": bits, "pairs": pairs})
    return found


def prunings(model: nn.Module, search: Batches, held_out: Batches, margin: float) -> list[dict[str, Any]]:
    """Each method at each size: chosen on the first half, its loss measured on the other.

    Returns:
        Rows of {"method", "kept", "experts", "groups" (layer -> the experts that become one each), "dropped" (layer
        -> experts without a place), the paired rise of the loss as `ratio` gives it, "share" and "share_half" of the
        loss, "within" the margin: True, False, or None where the text does not decide, "random": the loss minus the
        mean of random prunings, "serving"}.

    Raises:
        ValueError: the experts cannot be cut, or a copy of most of them does not fit beside the model.
    """
    gates, number, least, limits = cuttable(model)
    _check_memory(model)
    sizes = dict.fromkeys(round(number * size / limits) * limits for size in SIZES)
    methods = METHODS[:1] if limits > 1 else METHODS
    tried = [(size, method) for size in sizes if least <= size < number for method in methods]
    base, chance = measured(model, held_out), dict[int, Rows]()
    rows = []
    for size, method in tried:
        groups, counts = plan(model, gates, search, size, method)
        if size not in chance:
            chance[size] = at_random(model, gates, groups, held_out, RANDOM)[1]
        smaller = cut(model, gates, groups, counts, method == "m-smoe")
        after = measured(smaller, held_out)
        rise = paired(after, base, len(tried))
        gone = {layer: sorted(set(range(number)).difference(*of)) for layer, of in groups.items()}
        rows.append(
            {"method": method, "kept": size, "experts": number, "groups": groups, "dropped": gone, **rise,
             **verdict(rise, mean_of(base), margin), "random": paired(after, chance[size], len(tried)),
             "serving": served(smaller, held_out, gate_top_k(gates[0]).value)[1]}
        )  # fmt: skip
    return rows


def _check_memory(model: nn.Module) -> None:
    """ValueError where a copy of most of the experts does not fit beside the model."""
    parameters = list(model.parameters())
    if any(one.is_meta for one in parameters):
        raise ValueError("they need a copy of the experts in memory")
    needed, device = sum(one.numel() * one.element_size() for one in parameters), parameters[0].device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif hasattr(os, "sysconf"):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - needed
    else:
        return
    if needed > 0.9 * free:
        raise ValueError(f"a copy of the experts takes up to {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are left")


def prompt_ids(tokenizer: Any, prompt: Any) -> Tensor:
    """The tokens [1, T] of a text, or of messages in the chat template; ValueError if there are none."""
    chat = {"add_generation_prompt": True, "return_tensors": "pt"}
    try:
        text = isinstance(prompt, str)
        given = tokenizer(prompt, return_tensors="pt") if text else tokenizer.apply_chat_template(prompt, **chat)
        ids: Tensor = given if isinstance(given, Tensor) else given["input_ids"]
    except Exception as error:  # raised by the template: roles that do not alternate, a missing content, …
        raise ValueError(f"audit: task: the tokenizer rejects the prompt {prompt!r}: {error}") from None
    if not ids.numel():
        raise ValueError(f"audit: task: the prompt {prompt!r} has no token")
    return ids


@torch.no_grad()
def _spent(model: Any, tokenizer: Any, ids: Tensor, answer: str, most: int) -> tuple[int, bool]:
    """Tokens generated until the answer, the end of the text or `most`; whether the answer came."""
    ids, found = ids.to(device_of(model)), False
    begun = 1 if model.config.is_encoder_decoder else ids.shape[1]

    def stop(ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        nonlocal found
        found = answer in tokenizer.decode(ids[0, begun:], skip_special_tokens=True)
        return torch.full((len(ids),), found, dtype=torch.bool, device=ids.device)

    end = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None]
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "num_beams": 1, "max_new_tokens": most}
    out = model.generate(ids, **given, stopping_criteria=[stop], pad_token_id=end[0] if end else None)
    return out.shape[1] - begun, found


def answers(
    model: Any, tokenizer: Any, task: Sequence[tuple[Tensor, str]], ks: Sequence[int | None], own: int | None, most: int
) -> list[dict[str, Any]]:
    """By k: the share of prompts that reach their answer, the tokens spent, and both beside those at the model's own k.

    Where no answer comes, the tokens until the end of the text, or `most`, count. "reached", "tokens" a prompt, "times"
    (tokens over those at the own k) and "gained" (share of answers minus that at the own k): as `ratio` gives them,
    over prompts, the last two paired and corrected for the number of k.
    """
    ones = [1] * len(task)
    spent: dict[int | None, list[tuple[int, bool]]] = {}
    for k in dict.fromkeys([own, *ks]):
        with nullcontext() if k is None or k == own else set_top_k(model, k):
            spent[k] = [_spent(model, tokenizer, *one, most) for one in task]
    rows = []
    for k, found in sorted(spent.items(), key=lambda one: one[0] or 0):
        tokens, reached = ([float(one[at]) for one in found] for at in (0, 1))
        base, before = ([float(one[at]) for one in spent[own]] for at in (0, 1))
        gained = [mine - its for mine, its in zip(reached, before, strict=True)]
        others = max(1, len(spent) - 1)
        rows.append(
            {"top_k": k, "prompts": len(task), "reached": _spread(reached, ones), "tokens": _spread(tokens, ones),
             "times": None if k == own else _spread(tokens, base, others),
             "gained": None if k == own else _spread(gained, ones, others)}
        )  # fmt: skip
    return rows


def _spread(tops: Sequence[float], bottoms: Sequence[float], comparisons: int = 1) -> dict[str, Any]:
    """`ratio`, without an interval where no prompt differs: that would be one of width 0, whatever their number."""
    found = ratio(tops, bottoms, comparisons)
    return found if found["error"] else {**found, "half": None}
