"""Routing traces: written while a model runs, read back, replayed, and made of what engines give."""

import base64
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pointsman import MoE, record_routing, replay_routing
from pointsman._errors import RunError
from pointsman.routing import RoutingContext
from pointsman.traces import MISSING, RoutingTrace
from pointsman.traces.engines import from_llama_cpp, from_megatron, from_requests, from_sglang
from pointsman.traces.trace import TraceWriter, hash_of

LAYERS, EXPERTS, K = 3, 8, 2


class Model(nn.Module):
    """Three sparse layers on embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(MoE(16, 8, EXPERTS, top_k=K) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden, RoutingContext(padding_mask=mask))
        return hidden


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    built = Model().eval()
    for layer in built.layers:
        layer.router.score.weight.data.mul_(50)  # margins far above rounding
    return built


@pytest.fixture
def trace() -> RoutingTrace:
    """Four sequences of 40 tokens with logits."""
    return random_trace(lengths=(40, 40, 40, 40))


def random_trace(lengths: tuple[int, ...], seed: int = 0) -> RoutingTrace:
    generator = torch.Generator().manual_seed(seed)
    logits = {f"layers.{i}": torch.randn(sum(lengths), EXPERTS, generator=generator) for i in range(LAYERS)}
    return RoutingTrace(
        experts={name: one.topk(K).indices.to(torch.int16) for name, one in logits.items()},
        num_experts=dict.fromkeys(logits, EXPERTS),
        lengths=torch.tensor(lengths),
        weights={name: one.topk(K).values.softmax(-1) for name, one in logits.items()},
        logits=logits,
    )


def test_a_model_writes_all_its_forwards_without_padding(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "trace.safetensors"
    batches = [torch.randint(50, (2, 7)), torch.randint(50, (3, 5))]
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, 3:] = False
    seen: list[dict[str, Tensor]] = []
    with torch.no_grad(), record_routing(model).save(file, logits=True):
        for tokens, given in zip(batches, (None, mask), strict=True):
            with record_routing(model) as records:
                model(tokens, given)
            seen.append({name: routing.experts for name, routing in records.items()})
    found = RoutingTrace.load(file)
    assert found.lengths.tolist() == [7, 7, 5, 3, 5]
    assert found.model == "Model"
    assert found.hashes is not None
    assert int(found.hashes[3]) == hash_of(batches[1][1, :3])
    for layer in found.layers:
        wanted = torch.cat([seen[0][layer], seen[1][layer][mask.reshape(-1)]])
        assert torch.equal(found.experts[layer].long(), wanted)
        assert torch.equal(found.logits[layer].topk(K).indices, found.experts[layer].long())
    assert list(tmp_path.iterdir()) == [file]  # nothing was left beside it


def test_a_mask_is_not_taken_for_token_ids(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(8, 8, 4)

        def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.moe(hidden, RoutingContext(padding_mask=mask))
            return out

    with record_routing(model := Masked()).save(tmp_path / "a.safetensors"):
        model(torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.bool))
    assert RoutingTrace.load(tmp_path / "a.safetensors").hashes is None


def test_virtual_experts_are_written_with_their_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = MoE(16, 8, 4, top_k=K, router="loss-free:nulls=2:kind=copy").eval()
    with torch.no_grad(), record_routing(layer) as records:
        layer(torch.randn(1, 40, 16))
    [routing] = records.values()
    found = RoutingTrace.load(records.save(tmp_path / "t"))
    [chosen], [weights] = found.experts.values(), found.weights.values()
    assert bool((chosen >= 4).any())
    assert torch.equal(weights, routing.chosen_weights)
    assert bool((weights > 0).all())


def test_the_last_forward_is_saved_from_the_records(model: Model, tmp_path: Path) -> None:
    tokens = torch.randint(50, (2, 6))
    with torch.no_grad(), record_routing(model) as records:
        model(tokens)
    found = RoutingTrace.load(records.save(tmp_path / "last.safetensors", tokens))
    assert found.lengths.tolist() == [6, 6]
    with torch.no_grad(), replay_routing(model, found.for_replay()):
        assert torch.equal(model(tokens), model(tokens))
    assert not found.logits


def test_an_error_leaves_nothing_and_an_empty_trace_says_so(model: Model, tmp_path: Path) -> None:
    with pytest.raises(IndexError), record_routing(model).save(tmp_path / "a.safetensors"):
        model(torch.full((1, 3), 50))
    with pytest.raises(ValueError, match="no router ran"), record_routing(model).save(tmp_path / "b.safetensors"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_saved_and_loaded_it_is_the_same(trace: RoutingTrace, tmp_path: Path) -> None:
    odd = trace.rows(torch.arange(3), torch.tensor([3]))  # 3 x 2 int16: what follows must still be aligned
    for one in (trace, odd):
        found = RoutingTrace.load(one.save(tmp_path / "t.safetensors"))
        for part in ("experts", "weights", "logits"):
            for layer, values in getattr(one, part).items():
                assert torch.equal(getattr(found, part)[layer], values), (part, layer)
        assert (found.num_experts, found.lengths.tolist()) == (one.num_experts, one.lengths.tolist())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not readable"),
        (b"\xff" * 64, "not readable"),
        ((2).to_bytes(8, "little") + b"{}", "no routing trace"),
        ((1 << 60).to_bytes(8, "little"), "not readable"),
    ],
)
def test_a_damaged_file_is_refused(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(RunError, match=told):
        RoutingTrace.load(file)


def test_a_file_of_other_numbers_is_read_whole_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"

    def load(experts: Tensor, lengths: Tensor, number: object = 4) -> RoutingTrace:
        header = {"format": "pointsman-trace", "version": 1, "layers": {"a": number}}
        save_file({"a.experts": experts, "lengths": lengths}, file, {"trace": json.dumps(header)})
        return RoutingTrace.load(file)

    wide = torch.tensor([[3], [-2], [0]])
    found = load(wide, torch.tensor([3], dtype=torch.int32))
    assert (found.experts["a"].dtype, found.lengths.dtype) == (torch.int16, torch.int64)
    assert found.experts["a"].tolist() == wide.tolist()
    for experts, number, told in (
        (wide + 65536, 4, "-2 to 3"), (wide + 40000, 50000, "-2 to 32767"), (wide.to(torch.uint16), 4, "not readable"),
        (wide + 0.5, 4, "'a.experts' is torch.float32"), (wide, 4.5, "no whole numbers"),
        (wide, math.inf, "no whole numbers"), (wide, "4", "no whole numbers"),
        (wide, True, "no whole numbers"), (wide * 0 - 2, 0, "no whole numbers above 0"), (wide > 0, 4, "is torch.bool"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=told):
            load(experts, torch.tensor([3]), number)
    for lengths, told in (
        (torch.tensor([3.5]), "'lengths' is torch.float32"),
        (torch.tensor([2**63 - 1, 2**63 - 1, 5]), "none below 0 or above their sum"),  # it wraps to 3
    ):
        with pytest.raises(RunError, match=told):
            load(wide, lengths)


def test_a_folder_is_no_file_of_a_trace(
    model: Model, trace: RoutingTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (".", tmp_path):
        with pytest.raises(RunError, match="a folder; a trace is one file"), record_routing(model).save(place):
            pytest.fail("the model would run in vain")
        with pytest.raises(RunError, match="a folder; a trace is one file"):
            trace.save(place)


def test_a_layer_by_another_name_is_refused(tmp_path: Path) -> None:
    chosen = {f"layer.{index}": torch.zeros(3, 1, dtype=torch.int16) for index in range(2)}
    file = RoutingTrace(chosen, dict.fromkeys(chosen, 2), torch.tensor([3])).save(tmp_path / "a")
    whole = file.read_bytes()
    for old, new in ((rb"layer.0\": 2", rb"layer.1\": 2"), (b'"layer.0.experts"', b'"layer.7.experts"')):
        assert old in whole
        file.write_bytes(whole.replace(old, new))
        with pytest.raises(RunError, match="name other layers"):
            RoutingTrace.load(file)


def test_every_cut_of_a_file_is_refused(trace: RoutingTrace, tmp_path: Path) -> None:
    whole = trace.save(tmp_path / "t.safetensors").read_bytes()
    for length in (4, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(RunError):
            RoutingTrace.load(tmp_path / "cut")
    with pytest.raises(RunError, match="no such file"):
        RoutingTrace.load(tmp_path / "missing")


def test_values_out_of_range_are_refused(trace: RoutingTrace) -> None:
    with pytest.raises(ValueError, match="-2 to 7"):
        replace(trace, experts={name: one + 1 for name, one in trace.experts.items()})
    with pytest.raises(ValueError, match=r"must be \[159, k\]"):
        replace(trace, lengths=torch.tensor([40, 40, 40, 39]))
    with pytest.raises(ValueError, match=f"{K - 1} weights a token, not {K}"):
        replace(trace, weights={name: one[:, 1:] for name, one in trace.weights.items()})
    missing = {name: one.clone().index_fill_(0, torch.tensor([5]), MISSING) for name, one in trace.experts.items()}
    with pytest.raises(ValueError, match="1 of 160 tokens have no recorded experts"):
        replace(trace, experts=missing).for_replay()


def test_a_file_holds_one_k(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", weights=False) as writer:
        writer.add("a", 4, torch.zeros(2, 1))
        with pytest.raises(ValueError, match="one file holds one k"):
            writer.add("a", 4, torch.zeros(2, 2))
        writer.add_sequences(torch.tensor([2]), None)


def test_engines_layouts(trace: RoutingTrace) -> None:
    routed = [
        torch.stack([trace.experts[layer][40 * s : 40 * s + 39] for layer in trace.layers], 1).numpy() for s in range(4)
    ]
    ids = [[s] * 40 for s in range(4)]
    found = from_requests(routed, EXPERTS, token_ids=ids)
    assert found.lengths.tolist() == [40] * 4
    assert bool((found.experts["0"][39] == MISSING).all())
    given = [one[:39] for of in trace.experts.values() for one in of.split(40)]
    assert all(map(torch.equal, given, [one[:39] for of in found.experts.values() for one in of.split(40)]))

    text = [{"routed_experts": base64.b64encode(one.astype("<i4").tobytes()).decode()} for one in routed]
    same = from_sglang(text, EXPERTS, layers=LAYERS, top_k=K, token_ids=ids)
    assert all(torch.equal(same.experts[layer], found.experts[layer]) for layer in found.layers)

    time_first = [trace.experts[layer].view(4, 40, K).transpose(0, 1).reshape(-1, K) for layer in trace.layers]
    same = from_megatron(time_first, EXPERTS, batch=4)
    assert same.lengths.tolist() == [40] * 4
    assert all(map(torch.equal, same.experts.values(), trace.experts.values()))


def test_llama_cpp_text() -> None:
    text = """
ggml_debug:           ffn_moe_argsort-0 = (i32)    ARGSORT(ffn_moe_probs-0{8, 3, 1, 1}, }) = {8, 3, 1, 1}
                                     [ [ [ 1, 2, 3, ...] ] ]
ggml_debug:             ffn_moe_topk-0 = (i32)       VIEW(ffn_moe_argsort-0{8, 3, 1, 1}, }) = {2, 3, 1, 1}
                                     [
                                      [
                                       [      5,       1],
                                       [      0,       7],
                                       [      2,       3],
                                      ],
                                     ]
                                     sum = 18.000000
"""
    found = from_llama_cpp(text, EXPERTS)
    assert found.experts["0"].tolist() == [[5, 1], [0, 7], [2, 3]]
    with pytest.raises(ValueError, match="printed in part"):
        from_llama_cpp(text.replace("[      0,       7]", "..."), EXPERTS)
    with pytest.raises(ValueError, match="no tensor"):
        from_llama_cpp("nothing", EXPERTS)
    last = "ffn_moe_topk-1 = (i32) VIEW(a) = {2, 1, 1, 1}\n[ [\n[ 4, 6],\n] ]\n"  # whose logits were wanted
    found = from_llama_cpp(text + last + text + last, EXPERTS)
    assert found.lengths.tolist() == [6]
    assert found.experts["1"].tolist() == [*[[-2, -2]] * 2, [4, 6]] * 2
    with pytest.raises(ValueError, match="layers of other numbers of tokens"):
        from_llama_cpp(text.replace("topk-0", "topk-2") + last, EXPERTS)
    for wrong in ("2.7", "9" * 400):
        with pytest.raises(ValueError, match=r"has a number that is no expert|experts must be"):
            from_llama_cpp(text.replace("[      2, ", f"[  {wrong}, "), EXPERTS)


def test_what_is_no_choice_of_experts_is_refused() -> None:
    one, routed = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, EXPERTS, dtype=torch.bool)
    for wrong in (routed, one + 0.9):
        with pytest.raises(ValueError, match="experts are torch"):
            from_megatron([wrong], EXPERTS)
    with pytest.raises(ValueError, match=r"whole numbers .* are expected, got torch.bool"):
        from_requests([routed[:, None]], EXPERTS)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32])
def test_what_is_missing_is_missing_in_every_dtype(kind: Any) -> None:
    found = from_requests([np.zeros((2, 1, 2), kind)], 256, token_ids=[[1, 2, 3]]).experts["0"]
    assert found.tolist() == [[0, 0], [0, 0], [-2, -2]]


def test_one_sequence_without_a_dimension_for_it_is_saved(tmp_path: Path) -> None:
    layer = MoE(8, 8, EXPERTS, router="hash", vocab_size=9)
    ids = torch.arange(5)
    with record_routing(layer) as records:
        layer(torch.randn(5, 8), RoutingContext(token_ids=ids))
    trace = RoutingTrace.load(records.save(tmp_path / "one.safetensors"))
    assert trace.lengths.tolist() == [5]
    assert trace.hashes is not None
    assert trace.hashes.tolist() == [hash_of(ids)]


def test_weights_of_some_layers_are_refused() -> None:
    chosen = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="layer 'b' has no weights, others have"):
        RoutingTrace({"a": chosen, "b": chosen}, {"a": 4, "b": 4}, torch.tensor([3]), weights={"a": torch.ones(3, 2)})


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of batch=0"):
        from_megatron([torch.zeros(4, 2)], 4, batch=0)
    with pytest.raises(ValueError, match="no whole tokens of 0 x 2"):
        from_sglang([{"routed_experts": ""}], 4, layers=0, top_k=2)
    assert from_sglang([{"routed_experts": ""}], 4, layers=1, top_k=2, token_ids=[[1]]).tokens == 1
    with pytest.raises(ValueError, match="request 1: 9 tokens, but routing of 5"):
        from_requests([torch.zeros(4, 2, 2).int(), torch.zeros(5, 2, 2).int()], 4, token_ids=[[1] * 5, [1] * 9])
    with pytest.raises(ValueError, match=r"request 1: whole numbers \[tokens, 2, 2\]"):
        from_requests([torch.zeros(4, 2, 2).int(), torch.zeros(4, 3, 2).int()], 4)
    with pytest.raises(ValueError, match="2 requests, but token_ids of 1"):
        from_requests([torch.zeros(4, 2, 2).int()] * 2, 4, token_ids=[[1] * 5])
    for wide in (torch.full((4, 1, 1), 65537), torch.full((4, 1, 1), -65536)):
        with pytest.raises(ValueError, match="-2 to 3"):
            from_requests([wide], 4)
        with pytest.raises(ValueError, match="-2 to 3"):
            from_megatron([wide[:, 0]], 4)
    with pytest.raises(ValueError, match="no whole tokens"):
        from_sglang([{"routed_experts": base64.b64encode(b"1234").decode()}], 4, layers=2, top_k=2)
    with pytest.raises(ValueError, match="no base64"):
        from_sglang([{}], 4, layers=2, top_k=2)
