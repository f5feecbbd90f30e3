"""Errors that the command line prints as one line."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class RunError(ValueError):
    """A user error: the command line prints it as one line and exits with code 2."""


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """Work stopped on request, after saving. The message says how to continue."""


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Around the import of an optional package: a missing one is a RunError, "WHAT: pip install 'pointsman[EXTRA]'"."""
    try:
        yield
    except ImportError as error:
        why = "" if isinstance(error, ModuleNotFoundError) else f" (installed, but {error})"
        raise RunError(f"{what}{why}: pip install 'pointsman[{extra}]'") from None


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """The end of an error about an unknown name: the most similar allowed name, if there is one, then all of them."""
    known = sorted(allowed)
    near = get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(known) or 'none'}"
