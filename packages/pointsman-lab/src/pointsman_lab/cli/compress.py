"""`pointsman compress MODEL`: fewer experts, by pruning or merging, verified on held-out text."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.cli.audit import domains_of, read_texts, tokenizer_of
from pointsman_lab.cli.hf import check_out, save
from pointsman_lab.cli.options import Parser, choose_device, whole

EPILOG = """examples:
  pointsman compress allenai/OLMoE-1B-7B-0924 --data en.txt,code.py --out half
  pointsman compress my-mixtral --experts 6 --method m-smoe --heal 200 --out six
  pointsman compress my-mixtral --experts 6 --uneven --out six-on-average

The folder holds a model that transformers alone loads, compression.json and
compression.md. Every second row of the text calibrates, the others verify.
docs/huggingface.md names the methods.
"""
RECORD = "compression.json"


def parser() -> Parser:
    flags = Parser("compress", "Prune or merge the experts of a Hugging Face MoE.", EPILOG)
    flags.add("model MODEL", "a folder with a saved model, or a name on the hub")
    flags.add("--experts N", "the share to keep, or their number (0.5)", type=kept, default=0.5)
    flags.add("--uneven", "layers may keep different numbers; --experts is their mean", action="store_true")
    flags.add("--method", "reap, frequency, norm, mean, hc-smoe, m-smoe, search, random", default="reap")
    flags.add("--data NAME|PATH,…", "one domain or several (stdlib)", default="stdlib")
    flags.add("--heal N", "steps of distillation afterwards, of the random prunings, too (0)", type=whole(0), default=0)
    flags.add("--random N", "random prunings beside it (3)", type=whole(1), default=3)
    flags.add("--eval-tokens", "tokens to read (default: 50000)", default=50_000)
    flags.add("--length N", "tokens a row (512)", type=whole(2, "length"), default=512)
    flags.add("--batch-size N", "rows a forward (4)", type=whole(1, "batch_size"), default=4)
    flags.add("--tokenizer MODEL", "whose tokenizer to take (default: the model's)")
    flags.add("--dtype")
    flags.common("the folder to write", settings="")
    return flags


def kept(text: str) -> float:
    """A share below 1, or a whole number of experts."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1 and not (value >= 1 and value.is_integer()):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are a share between 0 and 1, and a number of experts")
    return value


def run(words: Sequence[str]) -> int:
    values = parser().read(words)
    if values.out is None:
        raise RunError("pointsman compress: --out is missing: the folder for the smaller model")
    check_out(values.out, values.model, RECORD)
    device = choose_device(values.device)
    texts = {name: read_texts(data) for name, data in domains_of(values.data).items()}
    from pointsman.hf.loading import load_model
    from pointsman_lab.checkpoints import compress
    from pointsman_lab.checkpoints.choosing import METHODS

    if values.method not in METHODS:
        raise RunError(f"pointsman compress: --method {values.method!r}: {did_you_mean(values.method, METHODS)}")
    model, tokenizer = load_model(values.model, dtype=values.dtype, device=device), tokenizer_of(values)
    found = compress(
        model, tokenizer, texts, experts=values.experts, method=values.method, uneven=values.uneven,
        length=values.length,
        max_tokens=None if values.eval_tokens == "all" else values.eval_tokens, batch_size=values.batch_size,
        random=values.random, heal=values.heal, note=lambda told: print(f"pointsman: {told}", file=sys.stderr),
    )  # fmt: skip
    told = json.dumps({"source": values.model, **found.to_dict()}, allow_nan=False) + "\n"
    save(found.model, Path(values.out), tokenizer, **{RECORD: told, "compression.md": found.markdown()})
    print(found.markdown())
    print(values.out)
    return 0
