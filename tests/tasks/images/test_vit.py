"""The vision transformer against transformers' ViTModel with the same weights, its layouts, sizes and positions."""

import math

import pytest
import torch

from pointsman import add_losses
from pointsman.recording import record_routing
from pointsman_lab.registry import preset_config
from pointsman_lab.tasks.images.vit import VisionTransformer, VisionTransformerConfig

SHAPE = {
    "image_size": 16, "patch": 4, "num_classes": 5, "num_layers": 4, "dim": 32, "num_heads": 4, "head_dim": 8,
    "hidden_dim": 48, "num_experts": 4,
}  # fmt: skip


def build(**changes: object) -> VisionTransformer:
    return VisionTransformer(VisionTransformerConfig(**{**SHAPE, "init_std": 0.1, **changes})).eval()  # type: ignore[arg-type]


def test_without_experts_it_is_vit() -> None:
    from transformers import ViTConfig, ViTModel

    model = build(router="plain")
    config = model.config
    other = ViTModel(
        ViTConfig(
            hidden_size=config.dim, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, hidden_act="gelu",
            image_size=16, patch_size=4, layer_norm_eps=1e-5, qkv_bias=True, attn_implementation="sdpa",
        ),
        add_pooling_layer=False,
    ).eval()  # fmt: skip
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    theirs = other.state_dict()
    own = {
        "embedding.project.weight": theirs["embeddings.patch_embeddings.projection.weight"].flatten(1),
        "embedding.project.bias": theirs["embeddings.patch_embeddings.projection.bias"],
        "embedding.token": theirs["embeddings.cls_token"][0],
        "embedding.position": theirs["embeddings.position_embeddings"][0],
    }
    renamed = {"layernorm": "final_norm"}
    for index in range(4):
        # two namings, of transformers before and since 5
        for there, here in {
            "attention.attention.query": "attention.query", "attention.attention.key": "attention.key",
            "attention.attention.value": "attention.value", "attention.output.dense": "attention.output",
            "attention.q_proj": "attention.query", "attention.k_proj": "attention.key",
            "attention.v_proj": "attention.value", "attention.o_proj": "attention.output",
            "layernorm_before": "attention_norm", "layernorm_after": "feed_forward_norm",
        }.items():  # fmt: skip
            renamed[f"encoder.layer.{index}.{there}"] = renamed[f"layers.{index}.{there}"] = f"layers.{index}.{here}"
        for there, letter in {
            "intermediate.dense": "in",
            "output.dense": "out",
            "mlp.fc1": "in",
            "mlp.fc2": "out",
        }.items():
            for stack in ("encoder.layer", "layers"):
                for end, kind in (("weight", "w"), ("bias", "b")):
                    if (value := theirs.get(f"{stack}.{index}.{there}.{end}")) is not None:
                        own[f"layers.{index}.feed_forward.{kind}_{letter}"] = value
    for there, here in renamed.items():
        for end in ("weight", "bias"):
            if (value := theirs.get(f"{there}.{end}")) is not None:
                own[f"{here}.{end}"] = value
    missing, strange = model.load_state_dict(own, strict=False)
    assert not strange
    assert all(name.startswith("head.") for name in missing), missing
    images = torch.rand(3, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        torch.testing.assert_close(
            model.encode(images)[0], other(images).last_hidden_state, rtol=1e-5, atol=1e-5
        )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "layout", "millions"),
    [
        ("s32", "plain", 27.6), ("s32", "last:2:2", 57.0), ("s32", "every:2:1", 288.0),
    ],
)  # fmt: skip
def test_sizes_are_those_of_v_moe(size: str, layout: str, millions: float) -> None:
    router = "plain" if layout == "plain" else "vmoe"
    experts = 32 if layout == "every:2:1" else 8
    with torch.device("meta"):
        model = VisionTransformer(
            VisionTransformerConfig(
                router=router, num_experts=experts, moe_layers="last:2:2" if router == "plain" else layout,
                representation=512,
            )
        )  # fmt: skip
    counted = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert counted == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(("size", "millions"), [((16, 12, 768, 12), 86.57), ((16, 24, 1024, 16), 304.33)])
def test_larger_sizes_are_those_of_vit(size: tuple[int, ...], millions: float) -> None:
    shape = dict(zip(("patch", "num_layers", "dim", "num_heads"), size, strict=True))
    with torch.device("meta"):
        model = VisionTransformer(
            preset_config("vmoe-s32-every2", 0, router="plain", representation=0, hidden_dim=4 * size[2], **shape)
        )
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_it_starts_as_v_moe_does() -> None:
    images = torch.rand(2, 3, 16, 16)
    model = build(loss="sigmoid", equal_experts=True)
    with torch.no_grad():
        torch.testing.assert_close(model(images), torch.full((2, 5), -math.log(5)))
    assert float(model.embedding.position.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert model.embedding.token is not None
    assert not model.embedding.token.any()
    experts = dict(model.named_parameters())["layers.3.moe.experts.w_in"]
    assert torch.equal(experts[0], experts[3])
    assert not torch.equal(*dict(build().named_parameters())["layers.3.moe.experts.w_in"][:2])


@pytest.mark.parametrize("spec", ["vmoe", "smoe+similarity:source=attention:tau=1", "smoe+attention:heads=all"])
@pytest.mark.parametrize("pooling", ["token", "mean"])
def test_every_patch_is_routed_and_all_inform_each_other(spec: str, pooling: str) -> None:
    model = build(router=spec, pooling=pooling)
    model.head.classify.weight.data.normal_()
    images = torch.rand(2, 3, 16, 16, requires_grad=True)
    with record_routing(model) as records:
        logits = model(images)
    assert list(records) == ["layers.1.moe", "layers.3.moe"]
    assert all(routing.experts.shape == (2 * model.config.tokens, 2) for routing in records.values())
    assert model.config.tokens == 16 + (pooling == "token")
    logits[0].sum().backward()
    assert images.grad is not None
    assert images.grad[0].abs().amin((0,)).min() > 0
    assert not images.grad[1].any()


def test_bad_shapes_are_one_line() -> None:
    with pytest.raises(ValueError, match="patch=5: allowed are divisors of the images' side, 16"):
        build(patch=5)
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        build(pooling="meen")
    with pytest.raises(ValueError, match=r"images must be \[B, 3, 16, 16\], got \[1, 3, 8, 8\]"):
        build()(torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("router", ["plain", "vmoe+attention:heads=lowest-entropy-sequence"])
def test_memory_is_linear_in_the_batch(router: str) -> None:
    model = build(router=router).train()

    def kept(batch: int) -> int:
        seen: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(torch.rand(batch, 3, 16, 16)).sum()
            if router != "plain":
                loss = add_losses(loss, model)
            total = sum(seen.values())
        loss.backward()
        return total

    assert kept(32) < 4.2 * kept(8)
