"""`RoutingTrace`: which experts each token took in each layer, as a safetensors file with a JSON header.

Shapes: N tokens of all sequences in order, S sequences, k experts a token, E experts.

    header    format, version, model, origin, and for each layer its name and number of experts, in order
    lengths   [S] int64, the tokens of each sequence; hashes [S] int64, of their ids, if they are known
    L.experts [N, k] int16 of layer L: -1 none, -2 the engine did not say; L.weights [N, k], L.logits [N, E] float32
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self

import safetensors
import torch
from torch import Tensor

from pointsman._errors import RunError
from pointsman._files import open_ordinary, parse_json, replacing, scratch_folder
from pointsman.routing import Routing, RoutingContext

FORMAT, VERSION = "pointsman-trace", 1
NONE, MISSING = -1, -2
PARTS = {"experts": torch.int16, "weights": torch.float32, "logits": torch.float32}
PIECE = 1 << 20  # bytes that are copied at a time


@dataclass(frozen=True)
class RoutingTrace:
    """What the routers of a model chose on some sequences.

    Attributes:
        experts: layer -> [N, k] int16: the expert of each choice, -1 (none) or -2 (missing: the engine did not say).
        num_experts: layer -> E, the virtual experts included. virtual: layer -> how many of these, the last ones, are.
        lengths: [S] int64, the tokens of each sequence, in order; their sum is N.
        hashes: [S] int64, of each sequence's token ids (`hash_of`); None: not known.
        weights, logits: layer -> [N, k] and [N, E] float32; empty where they were not recorded.
        model: what was traced. origin: the program that wrote the routing.
    """

    experts: Mapping[str, Tensor]
    num_experts: Mapping[str, int]
    lengths: Tensor
    hashes: Tensor | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    logits: Mapping[str, Tensor] = field(default_factory=dict)
    virtual: Mapping[str, int] = field(default_factory=dict)
    model: str = ""
    origin: str = "pointsman"

    def __post_init__(self) -> None:
        tokens = self.tokens
        if not self.experts:
            raise ValueError("a routing trace needs at least one layer")
        if self.lengths.dim() != 1 or bool(((self.lengths < 0) | (self.lengths > tokens)).any()):
            raise ValueError(f"lengths must be [S], none below 0 or above their sum, got {list(self.lengths.shape)}")
        if self.hashes is not None and self.hashes.shape != self.lengths.shape:
            raise ValueError(f"hashes must be {list(self.lengths.shape)}, got {list(self.hashes.shape)}")
        for part in PARTS:
            for layer, values in getattr(self, part).items():
                if layer not in self.experts or layer not in self.num_experts:
                    raise ValueError(f"layer {layer!r} has {part} and no experts, or no number of experts")
                if values.dtype == torch.bool or values.is_floating_point() != PARTS[part].is_floating_point:
                    raise ValueError(f"layer {layer!r}: {part} are {values.dtype}")
                if values.dim() != 2 or len(values) != tokens:
                    raise ValueError(f"layer {layer!r}: {part} must be [{tokens}, k], got {list(values.shape)}")
                width = self.num_experts[layer] if part == "logits" else self.top_k(layer)
                if values.shape[1] != width:
                    raise ValueError(f"layer {layer!r}: {values.shape[1]} {part} a token, not {width}")
            if getattr(self, part) and (without := self.experts.keys() - getattr(self, part)):
                raise ValueError(f"layer {min(without)!r} has no {part}, others have")
        for layer, chosen in self.experts.items():
            most = min(self.num_experts[layer] - 1, torch.iinfo(torch.int16).max)
            if chosen.numel() and not MISSING <= int(chosen.min()) <= int(chosen.max()) <= most:
                raise ValueError(f"layer {layer!r}: experts must be -2 to {most}")
        for part, dtype in PARTS.items():  # in range: no number wraps
            object.__setattr__(self, part, {layer: of.to(dtype) for layer, of in getattr(self, part).items()})

    def __repr__(self) -> str:
        parts = "".join(f", {part}" for part in ("weights", "logits") if getattr(self, part))
        return f"RoutingTrace({self.tokens:,} tokens, {len(self.lengths)} sequences, {len(self.experts)} layers{parts})"

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self.experts)

    def top_k(self, layer: str) -> int:
        return self.experts[layer].shape[1]

    def rows(self, rows: Tensor, lengths: Tensor, hashes: Tensor | None = None) -> Self:
        """The trace of some tokens, in another order: rows [n] int64, as sequences of these lengths."""
        parts = {part: {name: one[rows] for name, one in getattr(self, part).items()} for part in PARTS}
        return replace(self, lengths=lengths, hashes=hashes, **parts)  # type: ignore[arg-type]

    def for_replay(self) -> dict[str, Tensor]:
        """layer -> experts [N, k] int64, as `replay_routing` takes them.

        Raises:
            ValueError: a choice is missing.
        """
        for layer, chosen in self.experts.items():
            if missing := int((chosen == MISSING).any(-1).sum()):
                raise ValueError(f"layer {layer!r}: {missing:,} of {self.tokens:,} tokens have no recorded experts; "
                                 "they cannot be replayed")  # fmt: skip
        return {layer: chosen.long() for layer, chosen in self.experts.items()}

    def save(self, path: str | Path) -> Path:
        """Writes the file whole."""
        with TraceWriter(Path(path), logits=bool(self.logits), weights=bool(self.weights)) as writer:
            writer.model, writer.origin, writer.virtual = self.model, self.origin, self.virtual
            for layer, chosen in self.experts.items():
                writer.add(layer, self.num_experts[layer], chosen, self.weights.get(layer), self.logits.get(layer))
            writer.add_sequences(self.lengths, self.hashes)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file.

        Raises:
            RunError: it is missing, no ordinary file, damaged, or no trace.
        """
        file = Path(path)
        try:
            descriptor = open_ordinary(file)
            with open(descriptor, "rb"), safetensors.safe_open(file, framework="pt") as opened:
                header = parse_json((opened.metadata() or {}).get("trace", "null"))
                names = set(opened.keys())
                if not isinstance(header, dict) or header.get("format") != FORMAT:
                    raise RunError(f"{file}: no routing trace (`record_routing(model).save(path)` writes one)")
                if header.get("version") != VERSION:
                    raise RunError(f"{file}: a trace of version {header.get('version')!r}; this one reads {VERSION}")
                experts, virtual = {**header["layers"]}, {**header.get("virtual", {})}
                numbers = [(number, virtual.get(layer, 0)) for layer, number in experts.items()]
                if not all(type(one) is type(two) is int and 0 <= two < one for one, two in numbers):
                    raise ValueError("its numbers of experts are no whole numbers above 0, or all are virtual")
                dtypes = {f"{layer}.{part}": dtype for layer in experts for part, dtype in PARTS.items()}
                dtypes |= dict.fromkeys(("lengths", "hashes"), torch.int64)
                if wrong := sorted(names - dtypes.keys() | {f"{layer}.experts" for layer in experts} - names):
                    raise RunError(f"{file}: damaged: its header and its tensors name other layers ({wrong[0]!r})")
                tensors = {name: opened.get_tensor(name) for name in names}
                for name, values in tensors.items():
                    if values.dtype == torch.bool or values.is_floating_point() != dtypes[name].is_floating_point:
                        raise ValueError(f"{name!r} is {values.dtype}")
                parts = {part: {layer: tensors[name] for layer in experts if (name := f"{layer}.{part}") in names}
                         for part in PARTS}  # fmt: skip
                lengths = tensors["lengths"].to(torch.int64)
                return cls(num_experts=experts, lengths=lengths, hashes=tensors.get("hashes"), virtual=virtual, **parts,
                           model=str(header.get("model", "")), origin=str(header.get("origin", "")))  # fmt: skip
        except FileNotFoundError:
            raise RunError(f"{file}: no such file") from None
        except (OSError, ValueError, KeyError, TypeError, NotImplementedError, safetensors.SafetensorError) as error:
            if isinstance(error, RunError):
                raise
            raise RunError(f"{file}: not readable as a routing trace ({error})") from None


def hash_of(ids: Sequence[int] | Tensor) -> int:
    """A 63-bit hash of a sequence's token ids, the same on every machine."""
    values = torch.as_tensor(ids).to("cpu", torch.int64).contiguous()
    digest = hashlib.blake2b(values.numpy().astype("<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class TraceWriter:
    """Writes a trace while a model runs, in bounded memory: each layer's tensors are spilled to a file of their own
    beside the result, and joined at the end. Nothing is left behind if the `with` ends in an error.

    Args:
        path: the file.
        weights, logits: whether they are recorded, too.
    """

    def __init__(self, path: Path, *, weights: bool = True, logits: bool = False) -> None:
        self.path = Path(path)
        self.parts = ("experts", *(("weights",) if weights else ()), *(("logits",) if logits else ()))
        self.model, self.origin = "", "pointsman"
        self.num_experts: dict[str, int] = {}
        self.virtual: Mapping[str, int] = {}
        self._widths: dict[str, int] = {}  # tensor -> columns
        self._files: dict[str, IO[bytes]] = {}
        self._rows: dict[str, int] = {}
        self._lengths: list[Tensor] = []
        self._hashes: list[Tensor] | None = []

    def __enter__(self) -> Self:
        if self.path.is_dir():
            raise RunError(f"{self.path}: this is a folder; a trace is one file")
        self._scratch = scratch_folder(self.path.absolute().parent)
        self._folder = self._scratch.__enter__()
        return self

    def add(
        self, layer: str, num_experts: int, experts: Tensor, weights: Tensor | None = None, logits: Tensor | None = None
    ) -> None:
        """More tokens of one layer: experts [n, k], weights [n, k], logits [n, E]; ValueError if k or E is not that of
        the layer's earlier tokens, or a part is missing."""
        if num_experts > torch.iinfo(torch.int16).max:
            raise ValueError(f"layer {layer!r}: {num_experts:,} experts; a trace holds at most 32,767")
        if self.num_experts.setdefault(layer, num_experts) != num_experts:
            raise ValueError(f"layer {layer!r}: {num_experts} experts, {self.num_experts[layer]} before")
        for part, values in zip(PARTS, (experts, weights, logits), strict=True):
            if part not in self.parts:
                continue
            name = f"{layer}.{part}"
            if values is None:
                raise ValueError(f"layer {layer!r}: no {part} to record")
            if self._widths.setdefault(name, values.shape[1]) != values.shape[1]:
                raise ValueError(f"layer {layer!r}: {part} [{len(values)}, {values.shape[1]}], but "
                                 f"[tokens, {self._widths[name]}] before: one file holds one k")  # fmt: skip
            if name not in self._files:
                self._files[name] = open(self._folder / str(len(self._files)), "w+b")  # noqa: SIM115 - closed at exit
            self._files[name].write(values.detach().to("cpu", PARTS[part]).contiguous().numpy().tobytes())
            self._rows[name] = self._rows.get(name, 0) + len(values)

    def add_sequences(self, lengths: Tensor, hashes: Tensor | None) -> None:
        """What the tokens of all layers are of: lengths [s], hashes [s] or None."""
        self._lengths.append(lengths.to("cpu", torch.int64))
        if hashes is None or self._hashes is None:
            self._hashes = None
        else:
            self._hashes.append(hashes.to("cpu", torch.int64))

    def forward(self, layer: str, routing: Routing, context: RoutingContext | None, ids: Tensor | None) -> None:
        """One layer's routing of a forward, given these token ids [B, T] where they are known; padding is left out."""
        ids = context.token_ids if ids is None and context is not None else ids
        ids = ids if ids is None or ids.dim() > 1 else ids[None]
        mask = None if context is None else context.padding_mask
        shape = next((one.shape for one in (mask, ids) if one is not None), torch.Size([1, len(routing.experts)]))
        real = torch.ones(shape, dtype=torch.bool) if mask is None else mask.cpu()
        if real.numel() != len(routing.experts):
            raise ValueError(f"layer {layer!r} routes {len(routing.experts)} tokens, the forward has {real.numel()}: "
                             "its input is not the sequences' tokens")  # fmt: skip
        kept = real.reshape(-1).to(routing.experts.device)
        chosen, weights = routing.chosen[kept], routing.chosen_weights[kept]
        self.add(layer, routing.probs.shape[-1], chosen, weights, routing.logits[kept])
        if layer == next(iter(self.num_experts)):  # once a forward
            rows = None if ids is None else zip(ids.reshape(shape).cpu(), real, strict=True)
            hashes = None if rows is None else torch.tensor([hash_of(row[keep]) for row, keep in rows])
            self.add_sequences(real.sum(-1), hashes)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._join()
        finally:
            for file in self._files.values():
                file.close()
            self._scratch.__exit__(kind, value, trace)

    def _join(self) -> None:
        if not self.num_experts:
            raise ValueError(f"{self.path}: no router ran, so there is nothing to save")
        lengths = torch.cat(self._lengths)
        tokens = int(lengths.sum())
        for name, rows in self._rows.items():
            if rows != tokens:
                raise ValueError(f"{name.rpartition('.')[0]!r} routed {rows:,} tokens, the first layer {tokens:,}: "
                                 "a layer ran in some forwards only, or reads other text (a decoder)")  # fmt: skip
        small = {"lengths": lengths} | ({"hashes": torch.cat(self._hashes)} if self._hashes else {})
        told = {"format": FORMAT, "version": VERSION, "model": self.model, "origin": self.origin}
        layers = {"layers": self.num_experts, "virtual": self.virtual}
        header: dict[str, Any] = {"__metadata__": {"trace": json.dumps(told | layers)}}
        place = 0
        names = {torch.int16: "I16", torch.float32: "F32", torch.int64: "I64"}
        shapes = {name: (torch.int64, [len(values)]) for name, values in small.items()}
        shapes |= {name: (PARTS[name.rpartition(".")[2]], [tokens, self._widths[name]]) for name in self._files}
        for name, (dtype, shape) in sorted(shapes.items(), key=lambda one: -one[1][0].itemsize):  # each one aligned
            size = dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with replacing(self.path) as aside, open(aside, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for values in small.values():
                out.write(values.numpy().tobytes())
            for name in header:
                if (file := self._files.get(name)) is not None:
                    file.seek(0)
                    while piece := file.read(PIECE):
                        out.write(piece)
