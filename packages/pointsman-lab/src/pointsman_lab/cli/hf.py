"""`pointsman hf replace|materialize|upcycle MODEL --out DIR`: changes the routers of a saved Hugging Face model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import write_synced
from pointsman_lab.cli.export import model_folder, refuse_runs
from pointsman_lab.cli.options import Parser, action_of, choose_device, note, number_from, whole
from pointsman_lab.runs.record import read_object

ACTIONS = {
    "replace": "give every sparse layer a router of pointsman",
    "materialize": "turn replaced routers into the class's own gates",
    "upcycle": "make a mixture of experts of a dense model's layers",
}
USAGE = """usage: pointsman hf ACTION MODEL --out DIR [options]

actions:
{actions}

examples:
  pointsman hf replace ./olmoe --router hyperrouter --out olmoe-hyper
  pointsman hf materialize olmoe-hyper --out olmoe-plain
  pointsman hf upcycle Qwen/Qwen3-0.6B --experts 8 --top-k 2 --out qwen3-8x

`pointsman hf ACTION --help` explains an action; docs/huggingface.md says what
each keeps of the model.
"""


def parser(action: str) -> Parser:
    flags = Parser(f"hf {action}", f"{ACTIONS[action][0].upper()}{ACTIONS[action][1:]}.")
    flags.add("model MODEL", "a folder with a saved model, or a name on the hub")
    if action == "replace":
        flags.add("--router", "the router; a|b is cycled over the sparse layers")
        flags.add("--start", "the routers' first weights", choices=("pretrained", "fresh"), default="pretrained")
    if action == "upcycle":
        flags.add("--experts N", "experts a layer", type=whole(1, "num_experts"))
        flags.add("--top-k K", "experts a token (2)", type=whole(1), default=2)
        flags.add("--router", "a router of pointsman (default: the class's own gate)")
        flags.add("--noise S", "noise on the copies, relative (0)", type=number_from(0, 10), default=0.0)
    flags.add("--dtype")
    flags.common("the folder to write", settings="")
    return flags


def run(words: Sequence[str]) -> int:
    action = action_of("hf", words, ACTIONS, USAGE)
    if action is None:
        return 0
    values = parser(action).read(words[1:])
    needed = {"replace": ("out", "router"), "materialize": ("out",), "upcycle": ("out", "experts")}[action]
    for name in needed:
        if getattr(values, name) is None:
            raise RunError(f"pointsman hf {action}: --{name} is missing")
    check_out(values.out, values.model)
    if getattr(values, "router", None):
        from pointsman.routers.frame.registry import split_specs

        split_specs(values.router)
    device = choose_device(values.device)
    from pointsman import hf
    from pointsman.hf.loading import load_model, load_tokenizer

    model = load_model(values.model, dtype=values.dtype, device=device)
    if action == "replace":
        model = hf.replace_routers(model, values.router, start=values.start)
    elif action == "materialize":
        model = hf.materialize(model)
    else:
        model = hf.upcycle(model, values.experts, top_k=values.top_k, router=values.router, noise=values.noise)
    try:
        tokenizer: Any = load_tokenizer(values.model)
    except RunError as error:
        tokenizer = None
        note(f"pointsman: without a tokenizer: {error}")
    save(model, values.out, tokenizer)
    print(values.out)
    return 0


def save(model: Any, out: Path, tokenizer: Any = None, **files: str) -> None:
    """Writes the model, its tokenizer and other files, or nothing where transformers or the disk cannot (RunError)."""
    with model_folder(out) as scratch:
        try:
            model.save_pretrained(scratch)
        except (RuntimeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            told = "if the weights of MODEL are quantized, as FP8, take those in bf16"
            what = f"transformers cannot save this {type(model).__name__} ({why})"
            raise RunError(f"--out {out}: {what}; {told}") from None
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        for name, text in files.items():
            write_synced(scratch / name, text.encode())


def check_out(out: Path, model: str, record: str = "") -> None:
    """Raises RunError if the folder to write holds the model to read, a run, or a model that is not one's own.

    Args:
        record: the file of an earlier output of the same command; if its "source" is `model`, it may be overwritten.
    """
    if Path(model).is_dir() and out.exists() and out.resolve() == Path(model).resolve():
        raise RunError(f"--out {out}: this is the model to read; choose another folder")
    refuse_runs(out, unless=("config.json", "generation_config.json"))
    if any(out.glob("*.safetensors")) or any(out.glob("*.bin")):
        if record and read_object(out / record).get("source") == model:
            return
        raise RunError(f"--out {out}: this folder holds a model, which would be overwritten; choose another folder")
