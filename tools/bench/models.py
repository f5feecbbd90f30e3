"""Our models and experts against others of the same shape, side by side: rates, and ratios to the peer.

    python -m tools.bench.models training      tiny-decoder against transformers' Mixtral: a training step
    python -m tools.bench.models generation    the same: greedy, 64 tokens after 32, with a cache
    python -m tools.bench.models encoder       tiny-mlm against XLM-R: a step of masked language modelling
    python -m tools.bench.models images        tiny-vit against timm's ViT: a training step, and inference
    python -m tools.bench.models experts       experts_implementation="pointsman" against grouped_mm and eager

Peers train as their own scripts do: Mixtral and our decoder with fused Adam; XLM-R with AdamW and logits of every
place, as transformers' run_mlm; timm's VisionTransformer with fused AdamW, as ours. Mixtral generates by
its `generate`, and by a bare loop of forwards with its cache, which does less.
"""

import argparse
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.control import step_end
from pointsman.delivery import add_losses
from pointsman.layer import MoE
from pointsman.ops.kernels import using
from pointsman_lab._grid import Grid
from pointsman_lab.models.config import build_model
from pointsman_lab.recipes import preset
from pointsman_lab.registry import preset_config
from pointsman_lab.tasks.language_modelling.generation import Sampling, generate
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.optimizer import build_adam, trainable
from tools.bench.turns import Call, drawn, page, table

PROMPT, NEW = 32, 64
MASKED_ROUTERS = ("plain", "switch", "xmoe", "switch+similarity", "switch+attention")
IMAGE_ROUTERS = ("smoe", "vmoe", "xmoe", "hyperrouter", "vmoe+similarity")
SHAPES = {  # dim, hidden, experts, k, tokens
    "small": (256, 512, 8, 2, 512),
    "tall": (512, 1024, 16, 2, 1024),
    "many experts": (512, 256, 64, 8, 1024),
    "decode": (512, 1024, 16, 2, 1),
}
EXPERT_CASES = (
    *((name, torch.float32, backward) for name in ("small", "tall", "many experts") for backward in (False, True)),
    ("decode", torch.float32, False), ("small", torch.bfloat16, True), ("decode", torch.bfloat16, False),
)  # fmt: skip


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Call:
    model.train()
    ours = any(isinstance(part, MoE) for part in model.modules())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        total = add_losses(loss(), model) if ours else loss()
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step_end(model)

    return step


def decoder_config() -> RunConfig:
    """tiny-decoder as Mixtral has it: without query-key norm, k = 2."""
    changes = {"train_top_k": "2", "model.router": "smoe:bias=false", "model.qk_norm": "none"}
    return preset("tiny-decoder").with_vocabulary(205).with_overrides(changes)


def mixtral(config: Any, experts: str) -> Any:
    import transformers

    settings = transformers.MixtralConfig(
        vocab_size=config.vocab_size, hidden_size=config.dim, intermediate_size=config.expert_width,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, head_dim=config.head_dim,
        num_key_value_heads=config.kv_heads, num_local_experts=config.num_experts, num_experts_per_tok=config.top_k,
        tie_word_embeddings=config.tied, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None,
        pad_token_id=0, use_cache=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(settings)
    model.set_experts_implementation(experts)
    return model


def training(rounds: int) -> list[Grid]:
    config = decoder_config()
    shape = (config.batch_size, config.segment_length + 1)

    def step(model: Any, *, ours: bool) -> Call:
        batch = drawn(lambda generator: torch.randint(205, shape, generator=generator))

        def loss() -> Tensor:
            tokens: Tensor = batch()
            if ours:
                return model(tokens[:, :-1], tokens[:, 1:]).loss  # type: ignore[no-any-return]
            logits = model(tokens[:, :-1], use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

        return stepping(model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True), loss)

    peers = {f"Mixtral, {name}": step(mixtral(config.model, name), ours=False) for name in ("grouped_mm", "eager")}
    with using(config.kernels):
        calls = {"pointsman": step(build_model(config.model), ours=True), **peers}
        count = config.batch_size * config.segment_length
        return [table("training step of tiny-decoder", calls, rounds, count, "tokens", list(peers))]


def generation(rounds: int) -> list[Grid]:
    config = decoder_config()
    ours, theirs = build_model(config.model).eval(), mixtral(config.model, "grouped_mm").eval()

    @torch.no_grad()
    def own(prompts: Tensor) -> None:
        sampling = Sampling(temperature=0)
        for _ in generate(ours, list(prompts.numpy()), tokens=NEW, context=PROMPT + NEW, sampling=sampling):
            pass

    @torch.no_grad()
    def bare(prompts: Tensor) -> None:
        read, cache = prompts, None
        name = "cache" if "cache" in inspect.signature(theirs.forward).parameters else "past_key_values"
        for _ in range(NEW):
            output = theirs(read, **{name: cache}, use_cache=True, logits_to_keep=1)
            cache, read = getattr(output, name), output.logits[:, -1].argmax(-1, keepdim=True)

    def by_generate(prompts: Tensor) -> None:
        mask = torch.ones_like(prompts)
        theirs.generate(prompts, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)

    ways: dict[str, Callable[[Tensor], None]] = {
        "pointsman": own, "Mixtral, generate": by_generate, "Mixtral, bare loop": bare,
    }  # fmt: skip
    grids = []
    with using(config.kernels):
        for batch in (1, 16):
            prompts = torch.randint(205, (batch, PROMPT), generator=torch.Generator().manual_seed(2))
            calls: dict[str, Call] = {name: partial(way, prompts) for name, way in ways.items()}
            title = f"generation, {batch} prompt{'s' * (batch > 1)}"
            grids.append(table(title, calls, rounds, batch * NEW, "tokens", list(calls)[1:]))
    return grids


def encoder(rounds: int) -> list[Grid]:
    import transformers

    config = preset("tiny-mlm", router="plain").with_vocabulary(8192)
    model: Any = config.model
    shape = config.batch_size, config.segment_length

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Full blocks [B, T] with 15 % masked; -100 where nothing is."""
        tokens = torch.randint(5, 8192, shape, generator=generator)
        masked = torch.rand(shape, generator=generator) < 0.15
        return torch.where(masked, 4, tokens), torch.where(masked, tokens, -100)

    def ours(router: str) -> Call:
        asked, batch = config.with_overrides({"model.router": router}), drawn(draw)
        built = build_model(asked.model)
        optimizer = build_adam(asked, trainable(built))
        return stepping(built, optimizer, lambda: built(*batch()).mean())

    peer = transformers.XLMRobertaForMaskedLM(
        transformers.XLMRobertaConfig(
            vocab_size=8192, hidden_size=model.dim, num_hidden_layers=model.num_layers, type_vocab_size=1,
            num_attention_heads=model.num_heads, intermediate_size=model.hidden_dim, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, max_position_embeddings=model.max_length + 2, pad_token_id=1,
        )
    )  # fmt: skip
    batch = drawn(draw)

    def loss() -> Tensor:
        inputs, labels = batch()
        return peer(inputs, labels=labels).loss  # type: ignore[no-any-return]

    adam = torch.optim.AdamW(peer.parameters(), lr=1e-3, weight_decay=0.01)
    with using(config.kernels):
        calls = {"XLM-R": stepping(peer, adam, loss), **{router: ours(router) for router in MASKED_ROUTERS}}
        return [table("masked language modelling, tiny-mlm", calls, rounds, shape[0] * shape[1], "tokens", ["XLM-R"])]


def images(rounds: int) -> list[Grid]:
    plain = preset_config("tiny-vit", 0, router="plain")
    same = "plain, inner width 256"
    models: dict[str, nn.Module] = {same: build_model(replace(plain, expert_hidden_dim=256))}
    try:
        from timm.models.vision_transformer import VisionTransformer
    except ImportError:
        peer = same
    else:
        peer = "timm's ViT"
        models[peer] = VisionTransformer(
            img_size=32, patch_size=4, num_classes=10, embed_dim=128, depth=4, num_heads=4, mlp_ratio=2,
            global_pool="avg", class_token=False, fc_norm=False,
        )  # fmt: skip
    models |= {router: build_model(replace(plain, router=router)) for router in ("plain", *IMAGE_ROUTERS)}

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        pixels = torch.rand(64, 3, 32, 32, generator=generator) * 2 - 1
        return pixels, torch.randint(10, (64,), generator=generator)

    def step(model: nn.Module) -> Call:
        batch = drawn(draw)

        def loss() -> Tensor:
            pixels, labels = batch()
            return F.cross_entropy(model(pixels), labels)

        return stepping(model, torch.optim.AdamW(model.parameters(), 1e-4, fused=True), loss)

    def infer(model: nn.Module) -> Call:
        batch, model = drawn(draw), model.eval()

        @torch.inference_mode()
        def run() -> None:
            model(batch()[0])

        return run

    steps = {name: step(model) for name, model in models.items()}
    trained = table("training step, batch 64", steps, rounds, 64, "images", [peer])
    calls = {name: infer(model) for name, model in models.items()}  # now, since it ends the training
    return [trained, table("inference", calls, rounds, 64, "images", [peer])]


def experts(rounds: int) -> list[Grid]:
    import transformers

    import pointsman.hf  # noqa: F401 - registers the implementation

    def layer(name: str, shape: tuple[int, ...], dtype: torch.dtype, backward: bool) -> Call:
        dim, hidden, count, k, tokens = shape
        config = transformers.MixtralConfig(
            hidden_size=dim, intermediate_size=hidden, num_local_experts=count, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=4, vocab_size=32,
        )  # fmt: skip
        torch.manual_seed(0)
        model: Any = transformers.MixtralForCausalLM(config)
        model.set_experts_implementation(name)
        module = model.model.layers[0].mlp.experts.to(dtype)

        def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
            scores = torch.softmax(torch.randn(tokens, count, generator=generator), -1).topk(k, -1)
            return torch.randn(tokens, dim, generator=generator).to(dtype), scores.indices, scores.values.to(dtype)

        batch = drawn(draw)

        def run() -> None:
            inputs, index, weights = batch()
            with torch.set_grad_enabled(backward):
                output = module(inputs.requires_grad_(backward), index, weights)
                if backward:
                    module.zero_grad()
                    output.sum().backward()

        return run

    grids = []
    for name, dtype, backward in EXPERT_CASES:
        shape = SHAPES[name]
        calls = {way: layer(way, shape, dtype, backward) for way in ("pointsman", "grouped_mm", "eager")}
        title = f"{name} {shape}, {str(dtype)[6:]}, {'forward + backward' if backward else 'forward'}"
        grids.append(table(title, calls, rounds, shape[-1], "tokens", ["grouped_mm"]))
    return grids


CASES = {case.__name__: case for case in (training, generation, encoder, images, experts)}


def main(arguments: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("case", choices=CASES)
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--out", type=Path, metavar="FILE.md", help="write the tables to this file, too")
    values = flags.parse_args(arguments)
    command = f"python -m tools.bench.models {values.case} --rounds {values.rounds}"
    page(command, CASES[values.case](values.rounds), values.out)


if __name__ == "__main__":
    main()
