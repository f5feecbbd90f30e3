"""Methods that prune or merge experts beside the best possible pruning: small models, every subset tried.

python -m tools.pruning run FOLDER     # trains the models of FOLDER that are missing, records them in records/pruning
python -m tools.pruning page           # docs/pruning.md from the record
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.diagnostics.observe import evaluating
from pointsman.hf.experts import SingleExpert
from pointsman.hf.gates import find_gates
from pointsman_lab._files import write_whole
from pointsman_lab._grid import NONE, Grid, wrapped
from pointsman_lab.checkpoints.audit.trials import halves, mean_of, measured
from pointsman_lab.checkpoints.choosing import METHODS, plan
from pointsman_lab.checkpoints.cutting import cut
from pointsman_lab.checkpoints.text import TextBatch, text_batches
from pointsman_lab.report.audit_costs import spread as shown
from pointsman_lab.report.cell import Paired

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "records" / "pruning" / "record.jsonl", ROOT / "docs" / "pruning.md"
KEPT, SEEDS, STEPS, TOKENS, LENGTH = 6, 5, 200, 4096, 128
TRAINED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("qwen3_moe: no balance loss", {"router": "smoe:bias=false", "qk_norm": "head"}),
    "balanced": ("mixtral: balance loss 0.01", {"router": "smoe:bias=false:balance=0.01", "qk_norm": "none"}),
    "unscaled": (
        "olmoe: balance loss 0.01, weights not renormalised",
        {"router": "smoe:bias=false:renormalize=false:balance=0.01", "qk_norm": "all", "kv_heads": 2},
    ),
}
SHAPE: Mapping[str, Any] = {"num_layers": 2, "dim": 64, "num_heads": 2, "kv_heads": 1, "head_dim": 32, "hidden_dim": 32}


def trained(folder: Path, name: str, seed: int) -> tuple[Any, Any]:
    """The model of transformers and its tokenizer, trained on the source of Python if the folder lacks it."""
    from pointsman.hf.loading import load_tokenizer
    from pointsman_lab.data.subwords import save_tokenizer
    from pointsman_lab.models.huggingface.convert import to_transformers
    from pointsman_lab.recipes import preset
    from pointsman_lab.training.run import load_run
    from pointsman_lab.training.trainer import train

    out = folder / f"{name}-{seed}"
    settings: dict[str, Any] = {f"model.{key}": value for key, value in {**SHAPE, **TRAINED[name][1]}.items()}
    config = preset(
        "tiny-decoder", data="stdlib", steps=STEPS, seed=seed, train_top_k="2", batch_size=4, segment_length=LENGTH,
        checkpoint_every=0, eval_tokens=1024, eval_top_k=(2,), validate_every=0,
        **settings,
    )  # fmt: skip
    train(config, out, resume=out.exists())
    run = load_run(out)
    model = to_transformers(run.model, top_k=2, length=LENGTH)
    save_tokenizer(run.vocabulary, out)
    return model, load_tokenizer(str(out))


@torch.no_grad()
def enumerated(model: Any, batch: TextBatch, kept: int) -> tuple[list[tuple[int, ...]], Tensor]:
    """All subsets of a layer, and the loss [subsets, subsets] with one in the first layer and one in the second.

    A model with the same subset in both layers gives each layer's gate. For each subset of the first layer, the second
    layer's experts are computed once, and combined as the gate of each of its subsets says.
    """
    gates = find_gates(model)
    number = gates[0].num_experts
    subsets = list(combinations(range(number), kept))
    smaller = [cut(model, gates, {gate.layer: [[e] for e in subset] for gate in gates}) for subset in subsets]
    last = [find_gates(one)[-1] for one in smaller]
    target = batch.ids[:, 1:].reshape(-1).repeat(len(subsets))
    losses = torch.empty(len(subsets), len(subsets), dtype=torch.float64)
    for row, first in enumerate(smaller):
        residual, normed = before_last_block(first, batch.ids)
        flat = normed.flatten(0, 1)
        single = SingleExpert(gates[-1].experts)
        outputs = torch.stack([single(flat, expert) for expert in range(number)], 1)  # [tokens, experts, dim]
        weights = torch.zeros(len(subsets), len(flat), number)
        for one, subset, second in zip(weights, subsets, last, strict=True):
            _, share, chosen = second.routed(second.module(flat))
            one.scatter_(1, torch.tensor(subset)[chosen], share.float())
        mixed = torch.einsum("ste,ted->std", weights, outputs).view(len(subsets), *residual.shape)
        logits = model.lm_head(model.model.norm(residual + mixed)[:, :, :-1])
        nats = F.cross_entropy(logits.flatten(0, 2), target, reduction="none")
        losses[row] = nats.view(len(subsets), -1).double().mean(1)
    return subsets, losses


def before_last_block(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream before the last layer's experts, and what these read."""
    seen: list[tuple[Tensor, Tensor]] = []
    norm = model.model.layers[-1].post_attention_layernorm
    with norm.register_forward_hook(lambda module, given, out: seen.append((given[0], out))):
        model.model(input_ids=ids)
    return seen[0]


def judged(model: Any, tokenizer: Any, text: str) -> dict[str, Any]:
    """The record of one model: losses of the original, of all prunings (quantiles), and of every method."""
    batches = list(text_batches(tokenizer, [text], length=LENGTH, batch_size=TOKENS // LENGTH, max_tokens=TOKENS))
    calibrate, held_out = halves(batches)
    gates = find_gates(model)
    with evaluating(model):
        subsets, losses = enumerated(model, held_out[0], KEPT)
        ranked = losses.flatten().sort().values
        methods: dict[str, Any] = {}
        row = {
            "original": mean_of(measured(model, held_out)), "best": float(ranked[0]), "mean": float(ranked.mean()),
            "worst": float(ranked[-1]), "prunings": len(ranked), "methods": methods,
        }  # fmt: skip
        for method in METHODS:
            if method == "random":
                continue
            groups, counts = plan(model, gates, calibrate, KEPT, method)
            loss = mean_of(measured(cut(model, gates, groups, counts, align=method == "m-smoe"), held_out))
            places = [subsets.index(kept) for kept in (tuple(sorted(g[0] for g in groups[one])) for one in groups)]
            if all(len(group) == 1 for of in groups.values() for group in of):
                listed = float(losses[places[0], places[1]])
                if abs(listed - loss) > 1e-4:
                    raise AssertionError(f"{method}: the list of prunings says {listed}, the smaller model {loss}")
            methods[method] = {"loss": loss, "better": int((ranked < loss - 1e-6).sum())}
    return row


def run(folder: Path) -> None:
    from pointsman_lab.cli.audit import read_texts

    (text,) = read_texts("stdlib")
    rows = read()
    for seed in range(SEEDS):
        for name in TRAINED:
            if not any(row["model"] == name and row["seed"] == seed for row in rows):
                model, tokenizer = trained(folder, name, seed)
                rows.append({"model": name, "seed": seed, "steps": STEPS, **judged(model, tokenizer, str(text))})
                RECORD.parent.mkdir(parents=True, exist_ok=True)
                write_whole(RECORD, "".join(f"{json.dumps(row)}\n" for row in rows))
                print(f"{name}, seed {seed}: {rows[-1]['methods']}", file=sys.stderr)


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.is_file() else []


def spread(values: Sequence[float]) -> str:
    """Mean and half of the 95 % interval over seeds."""
    found = Paired(values)
    return shown({"mean": found.mean, "half": found.half if found.enough else None})


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    models = {name: [row for row in rows if row["model"] == name] for name in TRAINED}
    seeds = min(len(of) for of in models.values())
    models = {name: sorted(of, key=lambda row: row["seed"])[:seeds] for name, of in models.items()}  # the same seeds
    ranks: dict[str, list[float]] = {}
    table = []
    for method in [name for name in METHODS if name != "random"]:
        cells = [spread([row["methods"][method]["loss"] - row["best"] for row in of]) for of in models.values()]
        places = [row["methods"][method]["better"] / row["prunings"] for of in models.values() for row in of]
        ranks[method] = places
        table.append([method, *cells, f"{statistics.mean(places):.1%}", f"{max(places):.1%}"])
    table.sort(key=lambda cells: statistics.mean(ranks[cells[0]]))
    chance = [spread([row["mean"] - row["best"] for row in of]) for of in models.values()]
    table.append(["random pruning, the mean of all", *chance, "50%", NONE])
    whole = [spread([row["original"] - row["best"] for row in of]) for of in models.values()]
    table.append(["no pruning", *whole, NONE, NONE])
    sizes = [
        [name, TRAINED[name][0], spread([row["original"] for row in of]), spread([row["best"] for row in of]),
         spread([row["worst"] for row in of])]
        for name, of in models.items()
    ]  # fmt: skip
    count = rows[0]["prunings"]
    return "\n".join([
        "# Methods of pruning beside the best possible pruning", "",
        f"Two sparse layers of 8 experts have {count:,} prunings to {KEPT} experts a layer, so all of them can be "
        f"tried. {len(models)} models, {seeds} seeds each, trained by `pointsman` for {STEPS} steps on the source of "
        f"Python (width {SHAPE['dim']}, experts of width {SHAPE['hidden_dim']}, k = 2). Every method chooses on "
        f"{TOKENS // 2:,} tokens; the losses are those of {TOKENS // 2:,} other tokens, nats a token, on which the "
        "best pruning is chosen, too: nobody who chooses on other text reaches it every time.", "",
        Grid(["model", "class", "loss", "best pruning", "worst pruning"], sizes, code=False).markdown(), "",
        "**Regret**: the loss minus that of the best pruning, mean ± half of the 95 % interval over seeds. **Better "
        "prunings**: the share of all prunings with a smaller loss, mean and largest over models and seeds. A merged "
        "model (`hc-smoe`, `m-smoe`) is no pruning, so its regret may be negative. *No pruning* is the whole "
        "model: above 0 where the best pruning, chosen on the same tokens, has the smaller loss.", "",
        Grid(["method", *models, "better prunings", "at worst"], table, code=False).markdown(), "",
        "This says how methods rank on models of this size, trained this long, without healing. It says nothing of the "
        "loss that a large model pays, nor that the order is the same there. [The methods](huggingface.md"
        "#fewer-experts-in-the-checkpoint).", "",
        "```sh", "python -m tools.pruning run FOLDER     # trains, tries all prunings, writes records/pruning",
        "python -m tools.pruning page", "```", "",
    ])  # fmt: skip


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", folder]:
            run(Path(folder))
        case ["page"] if rows := read():
            print(write_whole(PAGE, wrapped(text(rows))))
        case words:
            print(__doc__)
            sys.exit(0 if {"-h", "--help"} & set(words) else 2)
