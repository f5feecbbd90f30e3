"""What inference and training engines give of their routing, as a `RoutingTrace`.

Each reader follows the layout that the engine documents, and is tested on files and values in that layout, not on the
engine itself. An engine says nothing of a sequence's last token, whose experts no further token needed: its choices are
`MISSING`. Expert numbers must be the model's own, not the places after a rearrangement (EPLB).
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pointsman.traces.trace import MISSING, RoutingTrace, hash_of


def from_requests(
    routed: Sequence[Any], num_experts: int, *, token_ids: Sequence[Sequence[int]] | None = None, origin: str = "vllm"
) -> RoutingTrace:
    """vLLM's and any engine's routing by request: for each request [tokens or tokens - 1, layers, k] whole numbers.

    vLLM: `RequestOutput.outputs[0].routed_experts` (`enable_return_routed_experts`).

    Args:
        num_experts: E of every layer.
        token_ids: each request's prompt and continuation; they say how long it is. Without them the requests end where
            their routing does.

    Raises:
        ValueError: requests of other layers or k, more routing than tokens, or more than one token without.
    """
    if token_ids is not None and len(token_ids) != len(routed):
        raise ValueError(f"{len(routed)} requests, but token_ids of {len(token_ids)}")
    parts: list[Tensor] = []
    lengths: list[int] = []
    for number, values in enumerate(routed):
        one = torch.as_tensor(values)
        plain = one.dim() == 3 and one.dtype != torch.bool and not one.is_floating_point()
        if not plain or (parts and one.shape[1:] != parts[0].shape[1:]):
            wanted = list(parts[0].shape[1:]) if parts else ["layers", "k"]
            raise ValueError(f"request {number}: whole numbers [tokens, {wanted[0]}, {wanted[1]}] are expected, got "
                             f"{one.dtype} {list(one.shape)}")  # fmt: skip
        tokens = len(one) if token_ids is None else len(token_ids[number])
        if not tokens - 1 <= len(one) <= tokens:
            raise ValueError(f"request {number}: {tokens} tokens, but routing of {len(one)}: all of them are expected, "
                             "or all but the last one")  # fmt: skip
        parts.append(torch.cat([one.long(), one.long().new_full((tokens - len(one), *one.shape[1:]), MISSING)]))
        lengths.append(tokens)
    if not parts:
        raise ValueError("no request has a routing")
    whole = torch.cat(parts)
    names = [str(layer) for layer in range(whole.shape[1])]
    return RoutingTrace(
        experts={name: whole[:, layer].contiguous() for layer, name in enumerate(names)},
        num_experts=dict.fromkeys(names, num_experts),
        lengths=torch.tensor(lengths),
        hashes=None if token_ids is None else torch.tensor([hash_of(ids) for ids in token_ids]),
        origin=origin,
    )


def from_sglang(
    meta_infos: Sequence[Mapping[str, Any]], num_experts: int, *, layers: int, top_k: int,
    token_ids: Sequence[Sequence[int]] | None = None,
) -> RoutingTrace:  # fmt: skip
    """SGLang's `meta_info` (`return_routed_experts`); layers, top_k: the model's. Raises as `from_requests` does."""
    routed = []
    for number, info in enumerate(meta_infos):
        try:
            content = base64.b64decode(info["routed_experts"], validate=True)
        except (KeyError, TypeError, binascii.Error):
            raise ValueError(f"request {number}: meta_info has no base64 text under 'routed_experts'") from None
        if min(layers, top_k) < 1 or len(content) % (4 * layers * top_k):
            raise ValueError(f"request {number}: {len(content) // 4} numbers: no whole tokens of {layers} x {top_k}")
        routed.append(torch.from_numpy(np.frombuffer(content, np.int32).copy()).view(-1, layers, top_k))
    return from_requests(routed, num_experts, token_ids=token_ids, origin="sglang")


def from_megatron(recorded: Sequence[Tensor], num_experts: int, *, batch: int = 1) -> RoutingTrace:
    """Megatron-core's choices (`RouterReplay`): for each layer [tokens, k], the tokens of a batch time first, as its
    layers see them ([T, B] flattened).

    Raises:
        ValueError: layers of other shapes, or tokens that are no whole number of batch rows.
    """
    if not recorded:
        raise ValueError("no layer was recorded")
    tokens = len(recorded[0])
    if batch < 1 or any(one.dim() != 2 or one.shape != recorded[0].shape for one in recorded) or tokens % batch:
        raise ValueError(f"{[list(one.shape) for one in recorded[:3]]}: every layer must be [tokens, k], the tokens a "
                         f"multiple of batch={batch}")  # fmt: skip
    rows = torch.arange(tokens).view(-1, batch).t().reshape(-1)  # [T, B] -> [B, T]
    names = [str(layer) for layer in range(len(recorded))]
    return RoutingTrace(
        experts={name: one.cpu()[rows] for name, one in zip(names, recorded, strict=True)},
        num_experts=dict.fromkeys(names, num_experts),
        lengths=torch.full((batch,), tokens // batch),
        origin="megatron-core",
    )


_TENSOR = re.compile(r"ffn_moe_topk-(\d+) = \(i32\).*= \{(\d+), (\d+), 1, 1\}")
_ROW = re.compile(r"\[([-\d, .]+)\]")


def from_llama_cpp(text: str, num_experts: int) -> RoutingTrace:
    """The text that `llama-eval-callback` prints, one sequence; each pass adds its tokens. In its last layer llama.cpp
    computes only those of a pass whose logits it wants: where that is one, the others are `MISSING` there.

    Raises:
        ValueError: no such tensor, or one that was printed in part ("..."): long tensors need a build that prints all.
    """
    layers: dict[int, list[list[list[int]]]] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = _TENSOR.search(line)
        if found is None:
            continue
        layer, k, tokens = (int(one) for one in found.groups())
        rows: list[list[int]] = []
        for below in lines[number + 1 :]:
            if "= (" in below or len(rows) == tokens:
                break
            row = _ROW.search(below)
            if "..." in below:
                raise ValueError(f"line {number + 1}: ffn_moe_topk-{layer} was printed in part ('...')")
            if row:
                values = [float(value) for value in row[1].split(",") if value.strip()]
                if not all(value.is_integer() for value in values):  # infinity is none
                    raise ValueError(f"line {number + 1}: ffn_moe_topk-{layer} has a number that is no expert")
                rows.append([int(value) for value in values])
        if len(rows) != tokens or any(len(row) != k for row in rows):
            raise ValueError(f"line {number + 1}: ffn_moe_topk-{layer} should have {tokens} rows of {k}")
        layers.setdefault(layer, []).append(rows)
    if len({len(passes) for passes in layers.values()}) != 1:
        raise ValueError("layers of other numbers of passes" if layers else "no tensor ffn_moe_topk-L in the text")
    sizes = [max(map(len, each)) for each in zip(*layers.values(), strict=True)]
    whole: dict[str, list[list[int]]] = {}
    for layer, passes in sorted(layers.items()):
        for rows, size in zip(passes, sizes, strict=True):
            if len(rows) < size and (len(rows) != 1 or layer != max(layers)):
                raise ValueError("layers of other numbers of tokens")
            whole.setdefault(str(layer), []).extend([[MISSING] * len(rows[0])] * (size - len(rows)) + rows)
    return RoutingTrace(
        experts={name: torch.tensor(rows) for name, rows in whole.items()},
        num_experts=dict.fromkeys(whole, num_experts), lengths=torch.tensor([sum(sizes)]), origin="llama.cpp",
    )  # fmt: skip
