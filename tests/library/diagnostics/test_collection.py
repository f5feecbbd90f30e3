import gc
import json
import os
import pickle
import subprocess
import sys
import tracemalloc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pointsman import MoE, RoutingContext, record_routing
from pointsman.diagnostics import Diagnostics, Fluctuation, Specialisation
from tests.library.diagnostics.helpers import same

VOCABULARY = 300


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.first = MoE(8, 16, 4, router="smoe")
        self.second = MoE(8, 16, 6, router="xmoe")

    def forward(self, tokens, padding_mask=None):
        context = RoutingContext(padding_mask=padding_mask)
        hidden = self.embedding(tokens)
        hidden = hidden + self.first(hidden, context)
        return hidden + self.second(hidden, context, return_routing=True)[0]


@pytest.fixture
def model():
    return Model().eval()


def test_every_layer_gets_every_diagnostic(model):
    diagnostics = Diagnostics()
    tokens = torch.randint(0, VOCABULARY, (3, 20))
    with diagnostics.observe(model, token_ids=tokens) as records:
        model(tokens)
    found = diagnostics.result()
    assert set(found) == {"first", "second"}
    kinds = {"entropy", "margin", "load", "co_activation", "collapse", "specialisation", "outputs"}
    assert all(set(layer) == kinds for layer in found.values())
    assert len(found["second"]["load"]["share"]) == 6
    assert found["first"]["entropy"]["tokens"] == 60
    assert not records["first"].probs.requires_grad
    json.dumps(found, allow_nan=False)
    assert all(not module._forward_hooks for module in model.modules())


def test_models_of_lower_precision(model):
    tokens = torch.randint(0, VOCABULARY, (3, 20))
    results = []
    for one, context in (
        (model, torch.autocast("cpu", torch.bfloat16)),
        (Model().eval().bfloat16(), torch.autocast("cpu", enabled=False)),
    ):
        diagnostics = Diagnostics()
        with torch.no_grad(), context, diagnostics.observe(one, token_ids=tokens):
            one(tokens)
        results.append(diagnostics.result())
        json.dumps(results[-1], allow_nan=False)
    assert results[0]["first"]["entropy"]["mean"] == pytest.approx(results[1]["first"]["entropy"]["mean"], abs=0.01)
    assert results[0]["first"]["outputs"]["cka_mean"] == pytest.approx(
        results[1]["first"]["outputs"]["cka_mean"], abs=0.05
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_backward_repeats_is_not_counted_again(reentrant):
    layer, hidden = MoE(8, 16, 4, router="smoe+similarity"), torch.randn(2, 5, 8, requires_grad=True)
    diagnostics, seen = Diagnostics("load", "mixing"), []
    with diagnostics.observe(layer), record_routing(layer, lambda *one: seen.append(one)):
        checkpoint(layer, hidden, use_reentrant=reentrant).sum().backward()
    assert [found["tokens"] for found in diagnostics.result()[""].values()] == [10, 10]
    assert len(seen) == 1


def test_a_mask_must_be_bool(model):
    attention_mask = torch.ones(1, 4, dtype=torch.int64)
    observing = Diagnostics().observe(model, mask=attention_mask)
    with pytest.raises(ValueError, match=r"mask must be bool, .*, got torch\.int64$"), observing:
        model(torch.randint(0, VOCABULARY, (1, 4)))


def test_a_mask_of_other_tokens_than_any_layer_reads_is_refused(model):
    tokens, diagnostics = torch.randint(0, VOCABULARY, (2, 4)), Diagnostics("load")
    observing = diagnostics.observe(model, mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask \[2, 3\]: no layer read so many tokens"), observing:
        model(tokens)


def test_only_what_is_asked_for(model):
    diagnostics = Diagnostics("entropy", "specialisation")
    with pytest.warns(UserWarning, match="'specialisation' found nothing: it needs token_ids"):  # noqa: SIM117
        with diagnostics.observe(model):
            model(torch.randint(0, VOCABULARY, (1, 4)))
    assert set(diagnostics.result()["first"]) == {"entropy"}  # no token ids, no specialisation
    with pytest.raises(ValueError, match="did you mean 'entropy'"):
        Diagnostics("entropie")


def test_token_ids_that_no_layer_reads_are_told(model):
    tokens, diagnostics = torch.randint(0, VOCABULARY, (2, 4)), Diagnostics()
    with pytest.warns(UserWarning, match="'specialisation' found nothing"):  # noqa: SIM117
        with diagnostics.observe(model, token_ids=tokens[:, :3]):
            model(tokens)
    with pytest.raises(ValueError, match="most_ids=0: allowed are whole numbers from 1"):
        Specialisation(0)


def test_a_kind_that_was_named_and_finds_nothing_says_so(model):
    mixing = Diagnostics("load", "mixing")
    with pytest.warns(UserWarning, match=r"'mixing' found nothing: it needs a router with a mixer"):  # noqa: SIM117
        with mixing.observe(model):
            model(torch.randint(0, VOCABULARY, (1, 4)))
    with Diagnostics().observe(model):  # all kinds: those that fit
        model(torch.randint(0, VOCABULARY, (1, 4)))
    with mixing.observe(model):  # no forward
        pass


def test_shards_equal_one_pass_and_padding_counts_nothing(model):
    tokens = torch.randint(0, VOCABULARY, (6, 20))
    mask = torch.rand(6, 20) < 0.8
    mask[:, 0] = True
    whole, shards = Diagnostics(), Diagnostics()
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        spoiled = torch.where(mask, tokens, torch.randint(0, VOCABULARY, tokens.shape))
        with whole.observe(model, token_ids=tokens[rows]):
            model(tokens[rows], mask[rows])
        shard = Diagnostics()
        with shard.observe(model, token_ids=spoiled[rows]):
            model(spoiled[rows], mask[rows])
        shards.merge(pickle.loads(pickle.dumps(shard)))
    assert whole.result()["first"]["load"]["tokens"] == int(mask.sum())
    assert same(whole.result(), shards.result(), 1e-6)


def test_what_was_merged_is_left_alone_and_goes_on(model):
    def seen(tokens, diagnostics):
        with torch.no_grad(), diagnostics.observe(model, token_ids=tokens):
            model(tokens)
        return diagnostics

    first, second, third = torch.randint(0, VOCABULARY, (3, 2, 10))
    part, whole = seen(first, Diagnostics()), Diagnostics()
    before = part.result()
    whole.merge(part).merge(pickle.loads(pickle.dumps(seen(second, Diagnostics()))))
    assert same(part.result(), before, 0)
    seen(third, whole)
    expected = seen(third, seen(second, seen(first, Diagnostics())))
    assert same(whole.result(), expected.result(), 1e-6)


@pytest.mark.slow
def test_memory_does_not_grow_with_tokens(model):
    diagnostics = Diagnostics()
    fluctuation = Fluctuation()

    def read(batches):
        for _ in range(batches):
            tokens = torch.randint(0, VOCABULARY, (4, 50))
            with torch.no_grad(), diagnostics.observe(model, token_ids=tokens) as records:
                model(tokens)
            fluctuation.update(records["first"], records["first"])

    def held():
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    read(15)  # PyTorch keeps something for every new shape
    size, before = len(pickle.dumps((diagnostics, fluctuation))), held()
    read(50)
    after = held()
    tracemalloc.stop()
    assert len(pickle.dumps((diagnostics, fluctuation))) == size
    assert (after - before) / 50 < 2_000  # bytes a batch; the hidden states of one batch are 6,400
    assert diagnostics.result()["first"]["load"]["tokens"] == 65 * 200


WORKER = """
import json, sys, torch, torch.distributed as distributed
from pointsman import MoE
from pointsman.diagnostics import Diagnostics
rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
torch.manual_seed(0)
layer, hidden = MoE(8, 16, 4).eval(), torch.randn(4, 10, 8)
diagnostics = Diagnostics("entropy", "load", "collapse")
with diagnostics.observe(layer):
    layer(hidden[2 * rank : 2 * rank + 2])
found = diagnostics.gather().result()
whole = Diagnostics("entropy", "load", "collapse")
with whole.observe(layer):
    layer(hidden)
with open(out, "w") as file:
    json.dump([found, whole.result()], file)
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_processes_gather_what_one_would_see(tmp_path):
    outs = [tmp_path / f"{rank}.json" for rank in range(2)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(rank), str(tmp_path / "store"), str(out)], env=environment)
        for rank, out in enumerate(outs)
    ]
    try:
        assert [process.wait(90) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for out in outs:
        found, whole = json.loads(out.read_text())
        assert same(found, whole, 1e-6)


def test_statistics_begun_in_inference_mode_go_on_outside_of_it(model):
    tokens = torch.randint(VOCABULARY, (2, 9))

    def collected(*modes):
        found = Diagnostics("collapse", "specialisation")
        for mode in modes:
            with mode(), found.observe(model, token_ids=tokens):
                model(tokens)
        return found

    mixed = collected(torch.inference_mode, torch.no_grad)
    assert same(mixed.result(), collected(torch.no_grad, torch.no_grad).result())
    assert same(collected(torch.inference_mode).merge(collected(torch.no_grad)).result(), mixed.result())
