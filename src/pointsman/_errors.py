"""One-line errors for the user's mistakes."""

from collections.abc import Iterable
from difflib import get_close_matches


class RunError(ValueError):
    """A mistake that the user can mend: the command line prints it as one line and exits with code 2."""


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """Work was asked to stop and has saved; the message says how to go on."""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest allowed one, if any is near, and all that are allowed."""
    known = sorted(allowed)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(known)}"
