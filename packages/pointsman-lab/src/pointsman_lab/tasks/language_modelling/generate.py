"""What `pointsman generate RUN --prompt TEXT` does: text from a language model, at any k, in the terminal."""

from __future__ import annotations

import argparse
import colorsys
import json
import sys
from collections import Counter
from typing import Any

from pointsman._errors import RunError
from pointsman._values import printable
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
    flags.add_argument("--show-experts", action="store_true", help="colour each token by its expert")
    flags.add_argument("--layer", metavar="L", help="whose experts, as 1 or layers.1 (default: the last sparse layer)")


def generate(flags: Parser, values: argparse.Namespace, device: str) -> int | None:
    """`pointsman generate` with a language model; None: the run is of another family."""
    if not values.prompt:
        raise RunError(f"{flags.prog}: --prompt is missing: the text to continue")
    if values.greedy:
        flags.without_effect(values, ("--temperature", "--top-p", "--seed"), "with --greedy")
    if not values.show_experts:
        flags.without_effect(values, ("--layer",), "without --show-experts")
    from pointsman._files import write_whole
    from pointsman.control import set_top_k
    from pointsman.ops.kernels import using
    from pointsman_lab.models.stack import LanguageModel
    from pointsman_lab.tasks.language_modelling.generation import Sampling, check_prompts, sparse_layer
    from pointsman_lab.training.run import load_run

    loaded = load_run(values.run, device=device, note=lambda message: print(printable(message), file=sys.stderr))
    if not isinstance(loaded.model, LanguageModel):
        return None
    temperature = 0.0 if values.greedy else values.temperature
    Sampling(temperature, values.top_p)  # refuses what cannot be drawn, before anything is printed
    layer = sparse_layer(loaded.model, values.layer) if values.show_experts else None
    encoded = [loaded.vocabulary.encode_compact(prompt) for prompt in values.prompt]
    if missed := sum(count for _, count in encoded):
        print(f"{missed} {loaded.vocabulary.level}s of the prompt are unknown to the model", file=sys.stderr)
    check_prompts([ids for ids, _ in encoded], loaded.context)  # before anything is printed
    if loaded.sparse:
        set_top_k(loaded.model, values.top_k or loaded.last_top_k)
    elif values.top_k:
        raise RunError(f"{flags.prog}: --top-k {values.top_k}: the model has no sparse layer")
    writer, texts = Writer(loaded.vocabulary, layer), []
    with using(loaded.kernels), loaded.autocast():
        for row, (prompt, (ids, _)) in enumerate(zip(values.prompt, encoded, strict=True)):
            drawn = Sampling(temperature, values.top_p, values.seed + row)
            how = {"tokens": values.tokens, "context": loaded.context, "sampling": drawn}
            texts.append(writer.write(loaded.model, prompt, ids, **how))
    writer.legend()
    if values.out:
        rows = [{"prompt": one, "text": text} for one, text in zip(values.prompt, texts, strict=True)]
        write_whole(values.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return 0


class Writer:
    """Prints a prompt and its continuation as it comes, coloured where the terminal has colours.

    Args:
        layer: the layer whose experts colour the tokens; None: no colours.
    """

    def __init__(self, vocabulary: Any, layer: str | None) -> None:
        from rich.console import Console

        self.console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        self.colours = layer is not None and self.console.color_system is not None
        self.vocabulary, self.layer = vocabulary, layer
        self.shares: Counter[int] = Counter()
        self.experts = 0

    def write(self, model: Any, prompt: str, ids: Any, **how: Any) -> str:
        """Generates, prints on the way, and returns what was added to the prompt."""
        from pointsman.control import named_routers
        from pointsman_lab.tasks.language_modelling.generation import TextStream, generate

        end, added = self.vocabulary.end_id, ""
        if self.layer is None:
            self._print(prompt, None)
            stream, waiting = TextStream(self.vocabulary, ids), []
        else:  # a token has its expert once it was read, those of the prompt after the first step
            self.experts = dict(named_routers(model))[self.layer].num_experts
            stream, waiting = TextStream(self.vocabulary), list(map(int, ids))
        for number, step in enumerate(generate(model, [ids], experts=self.layer is not None, **how)):
            experts = [None] * len(waiting) if self.layer is None else step.experts[self.layer][0].tolist()
            self.shares.update(expert for expert in experts if expert is not None)
            shown = [self._print(stream.push(token), one) for token, one in zip(waiting, experts, strict=True)]
            added += "".join(shown) if number else ""
            waiting = [] if step.tokens is None else step.tokens.tolist()
            if waiting == [end]:
                waiting = []
                break
        for token in waiting:
            added += self._print(stream.push(token), None)
        added += self._print(stream.flush(), None)
        self._print("\n", None)
        return added

    def _print(self, text: str, expert: int | None) -> str:
        shown = printable(text)
        if self.colours and expert is not None:
            from rich.text import Text

            self.console.print(Text(shown, style=colour(expert, self.experts)), end="")
        else:
            self.console.file.write(shown)
        self.console.file.flush()
        return text

    def legend(self) -> None:
        """Each expert's share of the tokens, in its colour."""
        if self.layer is None:
            return
        total = sum(self.shares.values())
        self._print(f"experts of {self.layer.removesuffix('.moe')}:", None)
        for expert, count in sorted(self.shares.items()):
            self._print(f" {expert}", expert)
            self._print(f" {count / total:.0%}", None)
        self._print("\n", None)


def colour(expert: int, experts: int) -> str:
    """Hues apart, in two brightnesses."""
    hue, value = expert / max(experts, 1), (1.0, 0.75)[expert % 2]
    red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.55, value))
    return f"rgb({red},{green},{blue})"
