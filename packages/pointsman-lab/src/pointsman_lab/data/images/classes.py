"""What the labels of images stand for: the names of their classes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ClassNames:
    """The classes that a run on images has learned.

    Attributes:
        names: in the order of the labels.
    """

    names: tuple[str, ...]
    level = "class"

    @property
    def size(self) -> int:
        """C, the number of classes."""
        return len(self.names)

    @property
    def digest(self) -> str:
        """Equal if and only if all names are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def decode(self, labels: Iterable[int]) -> str:
        """The names of these labels."""
        return ", ".join(self.names[label] for label in labels)

    def to_json(self) -> str:
        """The content of vocabulary.json."""
        return json.dumps({"level": self.level, "names": list(self.names)}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ClassNames:
        """What `to_json` wrote.

        Raises:
            ValueError: the text is something else.
        """
        values = json.loads(text)
        names = values.get("names") if isinstance(values, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("not a list of class names")
        return cls(tuple(names))
