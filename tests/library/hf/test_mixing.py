"""Mixing routers in Hugging Face models: start, causality, caches, padding, checkpointing, attention traces."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, MixtralForCausalLM

from pointsman import hf, step_end
from pointsman.control import named_routers
from pointsman.recording import record_routing
from pointsman.routers.frame import registry
from pointsman.routers.frame.stages import Mixer
from pointsman.routing import RoutingContext
from tests.library.hf import zoo
from tests.library.hf.test_replace import IDS, logits, spread

MIXED = (
    "smoe+similarity",
    "hyperrouter+similarity:source=input",
    "xmoe+similarity",
    "smoe+similarity:neighbours=lower-entropy",
)
CACHE = "cache" if "cache" in inspect.signature(MixtralForCausalLM.forward).parameters else "past_key_values"
WITH_TRACE = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3")


def strengthen(model: Any, value: float = 0.7) -> Any:
    with torch.no_grad():
        for _, router in named_routers(model):
            router.mix.strength.value.fill_(value)
    return model


def mixed(name: str, spec: str, strength: float = 0.7) -> Any:
    return strengthen(hf.replace_routers(spread(zoo.tiny_model(name)), spec), strength)


@pytest.mark.parametrize("spec", ["smoe+similarity", "hyperrouter+similarity:source=input", "similarity"])
def test_strength_zero_is_the_original(five: str, spec: str) -> None:
    model = spread(zoo.tiny_model(five))
    before = logits(model)
    hf.replace_routers(model, spec)
    assert torch.equal(logits(model), before)
    assert not torch.allclose(logits(strengthen(model)), before, atol=1e-5)


def test_texts_packed_in_one_row_are_refused() -> None:
    """The class's attention separates them, a mixer would not."""
    model, places = mixed("mixtral", "smoe+similarity").train(), torch.cat([torch.arange(5), torch.arange(3)])[None]
    row = IDS[:1, :8]
    with pytest.raises(ValueError, match="mix the texts of a packed row"):
        model(row, position_ids=places, use_cache=False)
    whole = model(row, use_cache=False).logits
    assert torch.equal(model(row, position_ids=torch.arange(8)[None], use_cache=False).logits, whole)


@pytest.mark.parametrize("carry", [None, {}, lambda probs: {"mean": probs.mean(1, keepdim=True)}])
def test_a_mixer_without_a_state_works_with_a_cache(carry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharper(Mixer):
        def forward(
            self, probs: Tensor, hidden: Tensor, context: RoutingContext
        ) -> tuple[Tensor, Any, dict[str, Tensor]]:
            assert context.past is None
            return probs.square(), carry(probs) if callable(carry) else carry, {}

    monkeypatch.setitem(registry.MIXERS, "sharper", registry.Entry("sharper", lambda layer: Sharper(), "", ""))
    model = mixed("mixtral", "smoe+sharper")
    with torch.no_grad():
        first = model(IDS[:, :4], use_cache=True)
        if callable(carry):
            with pytest.raises(ValueError, match=r"nor is a mixer whose carry is not \[B, S, ...\] of S tokens"):
                model(IDS[:, 4:], **{CACHE: getattr(first, CACHE)})
            return
        rest = model(IDS[:, 4:], **{CACHE: getattr(first, CACHE)})
        torch.testing.assert_close(rest.logits, model(IDS).logits[:, 4:], rtol=1e-4, atol=1e-5)


def test_strength_trains_from_zero(five: str) -> None:
    model = hf.replace_routers(spread(zoo.tiny_model(five)), "smoe+similarity").train()
    model(IDS, labels=IDS).loss.backward()
    for _, router in named_routers(model):
        gradient = router.mix.strength.value.grad
        assert gradient is not None
        assert torch.isfinite(gradient)
        assert float(gradient) != 0


def test_mixture_is_that_of_the_class() -> None:
    """Probabilities after mixing: for a softmax class the routing of softmax(router logits) is the mixed one."""
    for name, act in (("mixtral", lambda z: torch.softmax(z, -1)), ("deepseek_v3", torch.sigmoid)):
        model = mixed(name, "smoe+similarity")
        with torch.no_grad(), record_routing(model) as records:
            given = model(IDS, output_router_logits=True).router_logits
        for routing, scores in zip(records.values(), given, strict=True):
            torch.testing.assert_close(act(scores), routing.probs, rtol=1e-4, atol=1e-6)
            assert not torch.allclose(routing.probs, routing.unmixed, atol=1e-4)


@pytest.mark.parametrize("spec", MIXED)
def test_later_tokens_change_nothing(five: str, spec: str) -> None:
    model = mixed(five, spec)
    changed = IDS.clone()
    changed[:, 8:] = 7
    torch.testing.assert_close(logits(model)[:, :8], model(changed).logits[:, :8], rtol=1e-4, atol=1e-5)
    other = IDS.clone()
    other[1] = 9
    torch.testing.assert_close(logits(model)[0], model(other).logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["smoe+similarity", "xmoe+similarity:source=input"])
def test_token_by_token_equals_the_full_forward(five: str, spec: str) -> None:
    model = mixed(five, spec)
    expected = logits(model)
    cache = DynamicCache(config=model.config)
    steps = []
    with torch.no_grad():
        steps.append(model(IDS[:, :5], **{CACHE: cache}, use_cache=True).logits)
        for place in range(5, IDS.shape[1]):
            steps.append(model(IDS[:, place : place + 1], **{CACHE: cache}, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-3, atol=1e-5)


def test_generate_with_the_models_own_cache_and_left_padding(five: str) -> None:
    model = mixed(five, "smoe+similarity")
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = model.generate(IDS[:1], **settings)
    greedy = IDS[:1]
    for _ in range(5):
        with torch.no_grad():
            greedy = torch.cat([greedy, model(greedy, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(alone, greedy)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), IDS[:1]], 1)
    batch = torch.cat([padded, torch.randint(3, 90, (1, 15), generator=torch.Generator().manual_seed(5))])
    mask = (torch.arange(15) >= torch.tensor([[3], [0]])).long()
    given = model.generate(batch, attention_mask=mask, **settings)
    assert torch.equal(given[:1, 3:], alone)


def test_a_copy_of_a_prefix_cache_goes_on_with_another_text() -> None:
    model = mixed("mixtral", "smoe+similarity")
    prefix = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:, :5], **{CACHE: prefix}, use_cache=True)
        for rest in (IDS[:, 5:], IDS[:, 5:].flip(1)):
            found = model(rest, **{CACHE: copy.deepcopy(prefix)}, use_cache=True).logits
            whole = model(torch.cat([IDS[:, :5], rest], 1), use_cache=False).logits
            torch.testing.assert_close(found, whole[:, 5:], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="cropped"):
        copy.deepcopy(prefix).crop(2)


def test_beam_search_and_cropping_are_refused() -> None:
    model = mixed("mixtral", "smoe+similarity")
    with pytest.raises(ValueError, match="beam search"):
        model.generate(IDS, num_beams=2, max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    padded = torch.ones_like(IDS).index_fill(1, torch.arange(3), 0)
    for name, mask in (("mixtral", None), ("mixtral", padded), ("gpt_oss", padded)):  # of 4 dimensions, a dictionary
        settings = {"cache_implementation": "static", "max_new_tokens": 3, "pad_token_id": 0, "attention_mask": mask}
        with pytest.raises(ValueError, match="StaticCache"):
            mixed(name, "smoe+similarity").generate(IDS, **settings)
    cache = DynamicCache(config=model.config)
    hf.materialize(strengthen(model, 0.0))
    model(IDS, **{CACHE: cache}, use_cache=True)
    other = mixed("mixtral", "smoe+similarity")
    with pytest.raises(ValueError, match="without this router"):
        other(IDS[:, :1], **{CACHE: cache}, use_cache=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = mixed("mixtral", "hyperrouter+similarity").train()
    mask = torch.ones_like(IDS)
    mask[0, 9:] = 0
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.zero_grad()
        for _ in range(2):  # accumulation: a backward after each forward
            model(IDS, attention_mask=mask, labels=IDS, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-6)
    losses = [model(IDS, labels=IDS, use_cache=False).loss for _ in range(2)]
    with pytest.raises(ValueError, match="backward after each forward"):
        sum(losses).backward()


def reference_similarity(model: Any, layer: int, hidden: Tensor, tau: float) -> Tensor:
    """p_i + s (sum_j<=i S_ij p_j - p_i) in float64, from the definitions."""
    router = [router for _, router in named_routers(model)][layer]
    weight = router.score.weight.double()
    strength = float(router.mix.strength().detach())
    out = []
    for sequence in hidden.double():
        probs = torch.softmax(sequence @ weight.t(), -1)
        unit = sequence / sequence.norm(dim=-1, keepdim=True)
        scores = unit @ unit.t() / tau
        rows = torch.softmax(scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf), -1)
        out.append(probs + strength * (rows @ probs - probs))
    return torch.cat(out)


def test_similarity_against_the_definition() -> None:
    model = mixed("mixtral", "smoe+similarity:tau=0.3")
    seen: list[Tensor] = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad(), record_routing(model) as records:
        model(IDS)
    handle.remove()
    routing = next(iter(records.values()))
    expected = reference_similarity(model, 0, seen[0], 0.3)
    torch.testing.assert_close(routing.probs.double(), expected, rtol=1e-4, atol=1e-6)
    chosen = expected.topk(2, -1)
    assert torch.equal(routing.experts.sort(-1).values, chosen.indices.sort(-1).values)


@pytest.mark.parametrize("name", ["granitemoe", "granitemoeshared"])  # whose gates give a softmax's own result on
def test_statistics_leave_what_gates_keep_for_backward(name: str) -> None:
    model = hf.replace_routers(spread(zoo.tiny_model(name)), "smoe+attention").train()
    model(IDS, labels=IDS).loss.backward()
    step_end(model)
    assert all(int(router.mix.mixer.head_steps) == 1 for _, router in named_routers(model))


@pytest.mark.parametrize("name", WITH_TRACE)
@pytest.mark.parametrize("spec", ["smoe+attention", "smoe+attention:heads=all", "smoe+similarity:source=attention"])
def test_attention_informed(name: str, spec: str, tmp_path: Path) -> None:
    model = spread(zoo.tiny_model(name))
    before = logits(model)
    hf.replace_routers(model, spec)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    strengthen(model)
    full = logits(model)
    assert not torch.allclose(full, before, atol=1e-5)
    changed = IDS.clone()
    changed[:, 8:] = 7
    torch.testing.assert_close(full[:, :8], model(changed).logits[:, :8], rtol=1e-3, atol=1e-5)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = [model(IDS[:, :5], **{CACHE: cache}, use_cache=True).logits]
        pieces += [model(IDS[:, i : i + 1], **{CACHE: cache}, use_cache=True).logits for i in range(5, 12)]
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=1e-3, atol=1e-5)
    model.train()
    model(IDS, labels=IDS).loss.backward()
    step_end(model)
    model.eval()
    trained = logits(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), trained, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(copy.deepcopy(model)), trained, rtol=1e-4, atol=1e-5)


def test_attention_posterior_against_the_definition() -> None:
    """Head 0: A'_ij ~ A_ij N(u_i | H W_O,h v_j, sigma^2 I), all of it explicit and in float64."""
    model = mixed("qwen3_moe", "smoe+attention:sigma=0.05")
    layer = model.model.layers[0]
    seen: dict[str, Any] = {}
    tracer = layer.self_attn.__dict__["pointsman_tracer"]
    keep = tracer.keep
    tracer.keep = lambda query, key, value, kwargs: (
        seen.update(query=query.double(), key=key.double(), value=value.double(), scale=kwargs["scaling"]),
        keep(query, key, value, kwargs),
    )[1]
    handles = [
        layer.self_attn.register_forward_hook(lambda module, args, out: seen.update(output=out[0].double())),
        layer.mlp.register_forward_pre_hook(lambda module, args: seen.update(hidden=args[0].double())),
    ]
    with torch.no_grad(), record_routing(model) as records:
        model(IDS)
    for handle in handles:
        handle.remove()
    router = next(router for _, router in named_routers(model))
    heads, width = seen["query"].shape[1], seen["query"].shape[-1]
    group = heads // seen["key"].shape[1]
    weight = layer.self_attn.o_proj.weight.double()[:, :width] * heads
    expected = []
    for b in range(2):
        probs = torch.softmax(seen["hidden"][b] @ router.score.weight.double().t(), -1)
        query, key, value = seen["query"][b, 0], seen["key"][b, 0 // group], seen["value"][b, 0 // group]
        distance = (seen["output"][b][:, None] - (value @ weight.t())[None]).square().sum(-1)
        scores = query @ key.t() * seen["scale"] - distance / (2 * 0.05**2)
        rows = torch.softmax(scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf), -1)
        expected.append(probs + 0.7 * (rows @ probs - probs))
    torch.testing.assert_close(next(iter(records.values())).probs.double(), torch.cat(expected), rtol=2e-3, atol=1e-5)


def test_attention_that_is_not_known_is_refused_by_name() -> None:
    for name, words in (("gpt_oss", "sink"), ("qwen3_next", "attention")):
        model = zoo.tiny_model(name)
        names = list(model.state_dict())
        with pytest.raises(ValueError, match=rf"(?s)layers\.\d.*{words}"):
            hf.replace_routers(model, "smoe+attention")
        assert list(model.state_dict()) == names
    with pytest.raises(ValueError, match="is not causal"):
        hf.replace_routers(zoo.tiny_model("mixtral"), "smoe+attention:heads=lowest-entropy-sequence")


def test_an_attention_whose_implementation_chooses_the_tokens_is_refused() -> None:
    """It would attend to all of them instead, in the model itself."""
    model = spread(zoo.tiny_model("deepseek_v32", index_topk=4))
    before = logits(model)
    with pytest.raises(ValueError, match="DeepseekV32Model has an indexer"):
        hf.replace_routers(model, "smoe+attention")
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"sliding_window": 8}),
        ("qwen2_moe", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}),
        ("llama4", {"attention_chunk_size": 8}),
    ],
)
def test_texts_beyond_the_reach_of_an_attention_are_refused(name: str, changes: dict[str, Any]) -> None:
    model = hf.replace_routers(spread(zoo.tiny_model(name, **changes)), "smoe+attention")
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(IDS[:, :5], max_new_tokens=4, **settings)  # the last of the 9 tokens is not read
    for run in (lambda: logits(model), lambda: model.generate(IDS[:, :5], max_new_tokens=5, **settings)):
        with pytest.raises(ValueError, match="sequences of at most 8 tokens"):
            run()


def test_an_adapter_on_the_output_projection_is_refused() -> None:
    model = mixed("mixtral", "smoe+attention")
    model(IDS)
    attention = model.model.layers[0].self_attn
    attention.o_proj = torch.nn.Sequential(attention.o_proj)  # as PEFT wraps it
    with pytest.raises(ValueError, match="merge the adapter, or leave it out"):
        model(IDS)


def test_an_output_projection_whose_weight_is_computed_is_read_as_it_is() -> None:
    model = mixed("mixtral", "smoe+attention")
    expected = logits(model)
    for layer in model.model.layers:
        torch.nn.utils.parametrizations.weight_norm(layer.self_attn.o_proj)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_materialize_of_a_mixer() -> None:
    model = mixed("mixtral", "smoe+attention")
    with pytest.raises(ValueError, match=r"layers\.0.*mixer"):
        hf.materialize(model)
    expected = logits(strengthen(model, 0.0))
    hf.materialize(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    assert not model.model._forward_pre_hooks
    assert model.config._attn_implementation == "sdpa"
