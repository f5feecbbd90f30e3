"""`python -m tools.conformance [--originals FOLDER] [--only TEXT] [--write PAGE]`."""

import argparse
import datetime
import textwrap
import warnings
from pathlib import Path

import torch

from tools.conformance.originals import DIM, EXPERTS, TOKENS, Case, K, NotFetchedError, Row, in_float64
from tools.conformance.released import RELEASED
from tools.conformance.rows import NONE, ROWS

HEAD = """# Conformance with the originals

Our routers beside their public originals on the same random input, weights and biases, in float64 also where the
original asks for float32: the largest difference of a combine weight, of a loss, and of a gradient (of the input and
of the parameters, for a fixed sum of weights and losses). `-`: there is no such thing, or it is not compared.
{k}.
Of {date}, torch {torch}, transformers {transformers}, by

```sh
python -m tools.conformance --write docs/routers/conformance.md
```

which reads the originals when it runs; none is in this repository. With `--originals FOLDER` it reads copies of their
repositories (`FOLDER/owner+name`) at the same commits.

The gates of transformers that have a router here ([all of them](../huggingface-compatibility.md)) are compared by
`tests/library/hf/test_counterpart.py`: the same experts, and in float32 the same weights and gradients to 1e-5. The
balance losses of Mixtral and Switch, and Switch's z-loss, are in `tests/library/hf/test_balance.py`.

| spec | original | from | weights | losses | gradients |
|---|---|---|---|---|---|
"""
TAIL = "\n## Without a row\n\n"
EVERY = (*ROWS, *RELEASED)


def differences(mine: Case, theirs: Case) -> tuple[float, float | None, float | None]:
    """The largest absolute difference of weights, losses and gradients; None where there is nothing to compare."""
    weights = float((mine.weights - theirs.weights).detach().abs().max())
    if mine.losses.keys() != theirs.losses.keys():
        raise ValueError(f"losses {sorted(mine.losses)} and {sorted(theirs.losses)}")
    losses = [float((mine.losses[name] - theirs.losses[name]).detach().abs()) for name in mine.losses]
    if not mine.leaves:
        return weights, max(losses, default=None), None
    found = []
    for case in (mine, theirs):
        factors = torch.linspace(-1, 1, case.weights.numel(), dtype=torch.float64).view(case.weights.shape)
        total = (case.weights * factors).sum() + sum(case.losses.values())
        found.append(torch.autograd.grad(total, [case.leaves[name] for name in mine.leaves]))
    gradients = max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))
    return weights, max(losses, default=None), gradients


def line(row: Row, originals: Path | None) -> str:
    start = f"| `{row.spec}` | {row.original} | {row.where} |"
    try:
        with in_float64(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = differences(*row.compare(originals))
    except NotFetchedError as reason:
        return f"{start} not fetched: {reason} | | |"
    return start + "".join(f" {'-' if one is None else f'{one:.1e}' if one else '0'} |" for one in found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=__doc__)
    parser.add_argument("--originals", type=Path, help="folder of copies of the repositories, as owner+name")
    parser.add_argument("--only", default="", help="rows whose spec or original contains this")
    parser.add_argument("--write", type=Path, help="the page to write")
    values = parser.parse_args()
    lines = []
    for row in EVERY:
        if values.only in row.spec or values.only in row.original:
            lines.append(line(row, values.originals))
            print(lines[-1], flush=True)
    if values.write:
        import transformers

        sizes = f"{TOKENS} tokens of width {DIM}, {EXPERTS} experts, k {K} (unless the original has another)"
        head = HEAD.format(
            k=sizes, date=datetime.date.today().isoformat(), torch=torch.__version__.partition("+")[0],
            transformers=transformers.__version__,
        )  # fmt: skip
        none = "\n".join(textwrap.fill(f"- {one}: {why}.", 120, subsequent_indent="  ") for one, why in NONE.items())
        values.write.write_text(head + "\n".join(lines) + "\n" + TAIL + none + "\n")


if __name__ == "__main__":
    main()
