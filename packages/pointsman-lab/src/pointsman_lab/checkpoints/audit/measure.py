"""audit: routing statistics and quality of a Hugging Face MoE, measured with hooks.

At every k that the model accepts, with all diagnostics whose state is small.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pointsman._values import check_whole
from pointsman.control import set_top_k
from pointsman.diagnostics import Diagnostics
from pointsman.diagnostics.observe import evaluating
from pointsman.hf.counterpart import counterpart, virtual_experts_of
from pointsman.hf.gates import Gate, candidates, survey
from pointsman.hf.listen import GateListener
from pointsman.hf.top_k import gate_top_k, max_top_k
from pointsman_lab.checkpoints.audit.analyses import ANSWER_TOKENS, analysed, answers, prompt_ids, typical
from pointsman_lab.checkpoints.audit.blocks import mapped
from pointsman_lab.checkpoints.audit.result import AuditResult
from pointsman_lab.checkpoints.audit.run import AuditRun, finite
from pointsman_lab.checkpoints.audit.sample import Sample
from pointsman_lab.checkpoints.text import Conversation, TextBatch, device_of, text_batches

Progress = Callable[[int, int | None], None]
"""Called with the number of tokens read and the largest possible number (None: unknown)."""
MAX_BYTES = 1 << 30
"""Of one diagnostic's state in all layers. A larger diagnostic is left out; a note says so."""
GEMMA = "normalises its input, and multiplies each expert's weight by a trained factor"
WITHOUT = {
    "Gemma4TextRouter": GEMMA,
    "DiffusionGemmaTextRouter": GEMMA,
    "InklingTopkRouter": "scores its shared experts, too; their weights and those of the chosen experts sum to 1",
    "NllbMoeTop2Router": "draws its second expert, or renormalises the weights that its capacity leaves",
}
"""Class -> why it has no counterpart, where that is known."""
DOWN = ("down_proj", "w2", "output_linear")
"""Names of an expert's last projection."""


@torch.no_grad()
def audit(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[str | Conversation] | Mapping[str, Iterable[str | Conversation]],
    *,
    top_k: Sequence[int] | None = None,
    against: nn.Module | None = None,
    max_tokens: int | None = 50_000,
    length: int = 512,
    batch_size: int = 8,
    sample_tokens: int = 512,
    probe_tokens: int = 4096,
    task: Sequence[tuple[Any, str]] = (),
    answer_tokens: int = ANSWER_TOKENS,
    progress: Progress | None = None,
) -> AuditResult:
    """Measures the loss at every k and the statistics of every gate on texts.

    The model is not changed. Statistics are of text tokens; special tokens, tokens of a chat template and padding are
    counted separately. Memory does not grow with the texts.

    Args:
        model: a transformers MoE, on any device, in any precision.
        tokenizer: its tokenizer.
        texts: strings, or conversations (lists of {"role", "content"}); or domain -> its texts, and every figure is
            given by domain, too.
        top_k: values of k to measure (default: 1, 2, 4, … up to four times the model's own k, and its own k).
        against: another checkpoint of the same model, for routing fluctuation and a second loss.
        max_tokens: the largest number of tokens to read (None: all); each domain gets the same share.
        length: tokens per row.
        batch_size: rows per forward.
        sample_tokens: the number of tokens kept for the report's explorer, as many of each domain.
        probe_tokens: the number of tokens on which experts are removed and k is set by layer (0: not at all); half of
            them searches, the other half verifies. It takes a forward of these for each layer and k, and thirty more.
        task: (prompt, answer) pairs, a prompt a text or messages: how many tokens greedy generation spends at every k
            until the answer is in its text.
        answer_tokens: the largest number of tokens to generate for a prompt.
        progress: called after each batch.

    Raises:
        ValueError: the model has no gate, a number is out of range, there is no text, a text has the wrong type, or
            the two models cannot be compared.
    """
    parts = mapped(texts)
    check_whole("audit: length", length, 2)
    check_whole("audit: batch_size", batch_size)
    check_whole("audit: probe_tokens", probe_tokens, 0)
    check_whole("audit: answer_tokens", answer_tokens)
    if task and not hasattr(model, "generate"):
        raise ValueError(f"audit: task: {type(model).__name__} does not generate text")
    check_whole("audit: max_tokens", 1 if max_tokens is None else max_tokens)
    prompts = [(prompt_ids(tokenizer, prompt), answer) for prompt, answer in task]
    listener = GateListener(model, "audit")
    own, ks, notes = values_of_k(model, top_k)
    other = None if against is None else _matching(listener, against)
    run = AuditRun(model, listener, small_diagnostics(model, listener, notes), ks, own, other, len(parts))
    share = None if max_tokens is None else max(1, max_tokens // max(1, len(parts)))
    sample = Sample(tokenizer)
    probes: list[TextBatch] = []
    read = 0
    with evaluating(model), evaluating(against or model):
        for domain, of_domain in parts.items():
            kept, sample.left = 0, sample_tokens // len(parts)
            for batch in text_batches(tokenizer, of_domain, length=length, batch_size=batch_size, max_tokens=share):
                run.update(batch, sample, domain)
                if kept < probe_tokens // len(parts):
                    probes.append(batch)
                    kept += int(batch.mask.sum())
                read += int(batch.mask.sum())
                if progress:
                    progress(read, max_tokens)
        if not read:
            raise ValueError("audit: there is no text to read")
    protocol = {
        "length": length, "batch_size": batch_size, "max_tokens": max_tokens, "probe_tokens": probe_tokens,
        "answer_tokens": answer_tokens, "tokenizer": type(tokenizer).__name__, "vocabulary": _vocabulary(model),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."), "device": device_of(model).type,
    }  # fmt: skip
    result = run.result(protocol, notes, sample, routers_of(model))
    with evaluating(model):
        found = {"typical": typical(result.layers, tokenizer)}
        found |= analysed(model, run.blocks, run.trace(), probes, result.quality, notes)
        asked = [row["top_k"] for row in result.quality]
        found["answers"] = answers(model, tokenizer, prompts, asked, own, answer_tokens) if prompts else []
    return replace(result, analyses=finite(found), notes=[*dict.fromkeys([*result.notes, *notes])])


def _matching(listener: GateListener, against: nn.Module) -> GateListener:
    """The gates of `against`; ValueError unless its class, gates and numbers of experts equal the model's."""

    def facts(of: GateListener) -> list[str]:
        numbers = sorted({layer.num_experts for layer in of.layers.values()})
        return [type(of.model).__name__, f"{len(of.gates)} gates", f"{numbers} experts"]

    other = GateListener(against, "audit")
    for mine, its in zip(facts(listener), facts(other), strict=True):
        if mine != its:
            told = "both must be checkpoints of the same model"
            raise ValueError(f"audit: the model: {mine}, the one to compare with: {its}; {told}")
    return other


def values_of_k(model: nn.Module, wanted: Sequence[int] | None) -> tuple[int | None, list[int | None], list[str]]:
    """The model's own k, the values to measure (own k first), and notes. A k of None means that it is unknown.

    Raises:
        ValueError: a k is out of range, or differs from the model's own where k cannot be set.
    """
    if isinstance(wanted, int):
        raise ValueError(f"audit: top_k={wanted}: allowed is a list of values of k: [{wanted}]")
    gates, reasons = survey(model)
    notes = [f"k cannot be set here: {reason}" for reason in reasons[:1]]
    try:
        own = gate_top_k(gates[0]).value if gates else None
    except ValueError as error:
        own, notes = None, [*notes, str(error)]
    for name, module, block in candidates(model):
        k, most = getattr(module, "top_k", own), getattr(getattr(block, "experts", block), "num_experts", None)
        if isinstance(k, int) and (k < 1 or (isinstance(most, int) and k > most)):
            raise ValueError(f"audit: the model's own k is {k}: its config.json is damaged; allowed are "
                             f"{'1 and more' if most is None else f'1 to {most}'} ({name})")  # fmt: skip
    if notes or own is None:
        if wanted is not None and list(wanted) != [own]:
            raise ValueError(f"audit: top_k={list(wanted)}: {(notes or ['the gates keep no k'])[0]}")
        return own, [own], notes or ["k cannot be set here: the gates keep no k"]
    if wanted is None:
        most = min(4 * own, *(max_top_k(gate) for gate in gates))
        values = sorted({own, *(2**power for power in range(most.bit_length()) if 2**power <= most)})
    else:
        values = list(dict.fromkeys(wanted))
    checked: list[int | None] = [own]
    for k in values:
        try:
            with set_top_k(model, k):
                checked += [k] if k != own else []
        except ValueError as error:
            if wanted is not None:
                raise
            notes.append(str(error))
    return own, checked, list(dict.fromkeys(notes))[:2]


def small_diagnostics(model: nn.Module, listener: GateListener, notes: list[str]) -> Diagnostics:
    """The diagnostics whose state takes at most `MAX_BYTES`; a note for each one left out."""
    gates, _ = survey(model)
    notes.extend({gate.layout.note: None for gate in gates if gate.layout is not None and gate.layout.note})
    kinds = ["entropy", "margin", "load", "co_activation"]
    dim = max((gate.dim for gate in gates), default=0)
    experts = max((gate.num_experts for gate in gates), default=0)
    states = {"collapse": 8 * dim * (dim + experts), "specialisation": 4 * min(_vocabulary(model), 1 << 16) * experts}
    for kind, of_one in states.items():
        if (size := of_one * len(listener.gates)) <= MAX_BYTES:
            kinds.append(kind)
        else:
            notes.append(f"{kind} left out: it needs {size / 2**30:.1f} GiB for this model")
    return Diagnostics(*kinds)


def _vocabulary(model: nn.Module) -> int:
    """Tokens that the model knows; 0 where its configuration does not say."""
    return int(getattr(getattr(model, "config", None), "vocab_size", 0) or 0)


def routers_of(model: nn.Module) -> dict[str, dict[str, str | float | None]]:
    """Layer -> router: the spec with the same choice and weights, or None; without: why; shared_experts: how many."""
    gates, reasons = survey(model)
    specs: dict[Any, str | None] = {}
    found: dict[str, dict[str, str | float | None]] = {}
    for name, _, reason in (one.partition(": ") for one in reasons):
        found[name.rpartition(".")[0]] = {"router": None, "without": reason, "shared_experts": 0.0}
    for gate in gates:
        key = _settings(gate)
        if key not in specs:  # gates of equal class and settings are compared once
            specs[key] = counterpart(gate)
        name = type(gate.module).__name__
        general = "has a rule that no router here has" if gate.form.linear else "does not score with one weight"
        why = f"{name} {WITHOUT.get(name, general)}" if specs[key] is None else None
        found[gate.layer] = {"router": specs[key], "without": why, "shared_experts": shared_experts(gate)}
    return found


def _settings(gate: Gate) -> tuple[Any, ...]:
    """Everything on which a counterpart depends."""
    values = {name: value for name, value in vars(gate.module).items() if isinstance(value, int | float | str)}
    router = getattr(getattr(gate.module, "pointsman", None), "spec", None)
    own = (type(gate.module), virtual_experts_of(gate), gate.num_experts, gate.dim, gate.form)
    return (*own, tuple(sorted(values.items())), getattr(gate.block, "top_k", None), router)


def shared_experts(gate: Gate) -> float:
    """The width of the block's always-active shared experts, in hidden widths of one expert; 0 without any."""
    shared = [child for name, child in gate.block.named_children() if "shared" in name]
    parts = [(path.rpartition(".")[2], part) for child in shared for path, part in child.named_modules()]
    width = sum(part.in_features for name, part in parts if isinstance(part, nn.Linear) and name in DOWN)
    down = getattr(gate.experts, "down_proj", None)
    if not width or not isinstance(down, Tensor):
        return 0.0
    hidden = [size for size in down.shape[1:] if size != gate.dim] or [gate.dim]
    return width / hidden[0]
