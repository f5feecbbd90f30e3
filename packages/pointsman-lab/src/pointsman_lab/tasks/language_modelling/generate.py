"""What `pointsman generate RUN --prompt TEXT` does: text from a language model, at any k, in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._values import printable
from pointsman_lab.cli.options import Parser, number_from, whole


def add_flags(flags: Parser) -> None:
    """The flags of `pointsman generate`, besides RUN."""
    flags.add_argument("--prompt", action="append", metavar="TEXT", help="what to continue (may be repeated)")
    flags.add_argument("--top-k", type=whole(1), metavar="K", help="experts a token (default: the last of training)")
    flags.add_argument("--tokens", type=whole(1), default=200, metavar="N", help="how many (default: 200)")
    flags.add_argument("--greedy", action="store_true", help="always the likeliest token")
    flags.add_argument("--temperature", type=number_from(0, 100), default=1.0, metavar="T",
                       help="logits are divided by it; 0 is greedy (default: 1)")  # fmt: skip
    flags.add_argument("--top-p", type=number_from(0, 1), default=1.0, metavar="P",
                       help="draw among the likeliest tokens that reach P together (default: 1, all)")  # fmt: skip
    flags.add_argument("--seed", type=whole(0), default=0, metavar="S", help="default: 0")


def generate(flags: Parser, values: argparse.Namespace, device: str) -> int | None:
    """`pointsman generate` with a language model; None: the run is of another family."""
    if not values.prompt:
        raise RunError(f"{flags.prog}: --prompt is missing: the text to continue")
    if values.greedy:
        flags.without_effect(values, ("--temperature", "--top-p", "--seed"), "with --greedy")
    from pointsman.control import set_top_k
    from pointsman.ops.kernels import using
    from pointsman.routers.frame.registry import has_one_k
    from pointsman_lab._files import write_whole
    from pointsman_lab.models.stack import LanguageModel
    from pointsman_lab.tasks.language_modelling.generation import Sampling, check_prompts
    from pointsman_lab.training.run import load_run

    loaded = load_run(values.run, device=device, note=lambda message: print(printable(message), file=sys.stderr))
    if not isinstance(loaded.model, LanguageModel):
        return None
    temperature = 0.0 if values.greedy else values.temperature
    Sampling(temperature, values.top_p)  # refuses what cannot be drawn, before anything is printed
    encoded = [loaded.vocabulary.encode_compact(prompt) for prompt in values.prompt]
    if missed := sum(count for _, count in encoded):
        print(f"{missed} {loaded.vocabulary.level}s of the prompt are unknown to the model", file=sys.stderr)
    check_prompts([ids for ids, _ in encoded], loaded.context)  # before anything is printed
    if loaded.sparse:
        if values.top_k or not has_one_k(loaded.config.model.router):
            set_top_k(loaded.model, values.top_k or loaded.last_top_k)
    elif values.top_k:
        raise RunError(f"{flags.prog}: --top-k {values.top_k}: the model has no sparse layer")
    texts = []
    with using(loaded.kernels), loaded.autocast():
        for row, (prompt, (ids, _)) in enumerate(zip(values.prompt, encoded, strict=True)):
            drawn = Sampling(temperature, values.top_p, values.seed + row)
            how = {"tokens": values.tokens, "context": loaded.context, "sampling": drawn}
            texts.append(_shown(loaded.model, loaded.vocabulary, prompt, ids, **how))
    if values.out:
        rows = [{"prompt": one, "text": text} for one, text in zip(values.prompt, texts, strict=True)]
        write_whole(values.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return 0


def _shown(model: Any, vocabulary: Any, prompt: str, ids: Any, **how: Any) -> str:
    """Generates, prints on the way, and returns what was added to the prompt."""
    from pointsman_lab.tasks.language_modelling.generation import TextStream, generate

    added, end = "", vocabulary.end_id
    stream = TextStream(vocabulary, ids)
    print(printable(prompt), end="", flush=True)
    for drawn in generate(model, [ids], words=vocabulary.size, **how):
        if (token := int(drawn[0])) == end:
            break
        text = stream.push(token)
        print(printable(text), end="", flush=True)
        added += text
    rest = stream.flush()
    print(printable(rest), flush=True)
    return added + rest
