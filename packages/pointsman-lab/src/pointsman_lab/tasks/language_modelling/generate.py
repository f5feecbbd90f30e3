"""What `pointsman generate RUN --prompt TEXT` does: text from a language model, at any k, in the terminal."""

from __future__ import annotations

import argparse
import colorsys
import json
import sys
from collections import Counter
from collections.abc import Sequence
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
    sampling = Sampling(0.0 if values.greedy else values.temperature, values.top_p, values.seed)
    layer = sparse_layer(loaded.model, values.layer) if values.show_experts else None
    encoded = [loaded.vocabulary.encode_compact(prompt) for prompt in values.prompt]
    prompts = [ids for ids, _ in encoded]
    if missed := sum(count for _, count in encoded):
        print(f"{missed} {loaded.vocabulary.level}s of the prompt are unknown to the model", file=sys.stderr)
    check_prompts(prompts, loaded.context)  # before anything is printed
    writer = Writer(loaded.vocabulary, prompts, values.prompt, loaded.vocabulary.end_id, layer)
    if loaded.sparse:
        set_top_k(loaded.model, values.top_k or loaded.last_top_k)
    elif values.top_k:
        raise RunError(f"{flags.prog}: --top-k {values.top_k}: the model has no sparse layer")
    with using(loaded.kernels), loaded.autocast():
        writer.write(loaded.model, tokens=values.tokens, context=loaded.context, sampling=sampling)
    if values.out:
        rows = [{"prompt": one, "text": text} for one, text in zip(values.prompt, writer.texts, strict=True)]
        write_whole(values.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return 0


class Writer:
    """Prints prompts and their continuations; a single one as it comes, coloured where the terminal has colours.

    Args:
        ids, prompts: of each prompt.
        end_id: the id that ends a text; None: none does.
        layer: the layer whose experts colour the tokens; None: no colours.

    Attributes:
        texts: what was added to each prompt.
    """

    def __init__(
        self, vocabulary: Any, ids: Sequence[Any], prompts: Sequence[str], end_id: int | None, layer: str | None
    ) -> None:
        from rich.console import Console

        from pointsman_lab.tasks.language_modelling.generation import TextStream

        self.console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        self.colours = layer is not None and self.console.color_system is not None
        self.ids, self.prompts, self.end_id, self.layer = ids, prompts, end_id, layer
        self.streams = [TextStream(vocabulary, one if layer is None else ()) for one in ids]
        self.texts = [""] * len(ids)
        self.ended = [False] * len(ids)
        self.shares: Counter[int] = Counter()
        self.experts = 0

    def write(self, model: Any, **how: Any) -> None:
        """Generates, and prints on the way."""
        from pointsman.control import named_routers
        from pointsman_lab.tasks.language_modelling.generation import generate

        if self.layer is not None:
            self.experts = dict(named_routers(model))[self.layer].num_experts
        alone = len(self.ids) == 1
        held: list[list[tuple[str, int | None]]] = [[] for _ in self.ids]
        waiting: list[list[int]] = [[] if self.layer is None else list(map(int, one)) for one in self.ids]
        if self.layer is None and alone:
            self._print(self.prompts[0], None)
        for number, step in enumerate(generate(model, self.ids, experts=self.layer is not None, **how)):
            for row, stream in enumerate(self.streams):
                known = None if self.layer is None else step.experts[self.layer][row].tolist()
                if known is not None:  # the tokens that were read now have their experts
                    read, waiting[row] = waiting[row], []
                    for token, expert in zip(read, known[len(known) - len(read) :], strict=True):
                        self._add(held[row], row, stream.push(token), expert, alone, new=number > 0)
                        self.shares[expert] += 1
                if step.tokens is None or self.ended[row]:
                    continue
                token = int(step.tokens[row])
                if token == self.end_id:
                    self.ended[row] = True
                elif known is None:
                    self._add(held[row], row, stream.push(token), None, alone)
                else:
                    waiting[row].append(token)
            if all(self.ended):
                break
        for row, stream in enumerate(self.streams):
            for token in waiting[row]:
                self._add(held[row], row, stream.push(token), None, alone)
            self._add(held[row], row, stream.flush(), None, alone)
            if not alone:
                self._print(f"[{row + 1}] " + ("" if self.layer is not None else self.prompts[row]), None)
                for text, expert in held[row]:
                    self._print(text, expert)
            self._print("\n", None)
        self._legend()

    def _add(
        self, held: list[tuple[str, int | None]], row: int, text: str, expert: int | None, now: bool, new: bool = True
    ) -> None:
        if not text:
            return
        if new:
            self.texts[row] += text
        if now:
            self._print(text, expert)
        else:
            held.append((text, expert))

    def _print(self, text: str, expert: int | None) -> None:
        text = printable(text)
        if self.colours and expert is not None:
            from rich.text import Text

            self.console.print(Text(text, style=colour(expert, self.experts)), end="")
        else:
            self.console.file.write(text)
        self.console.file.flush()

    def _legend(self) -> None:
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
