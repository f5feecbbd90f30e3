"""How the ranks of a job share a model: which parameters are sharded, replicated, or lie with the experts.

Dense parameters lie on the mesh (replicas, shards), experts on (replicas, expert_shards, experts):

    world = replicas * shards        shards = expert_shards * experts
"""

from __future__ import annotations

from dataclasses import dataclass

from pointsman._errors import RunError, did_you_mean

PARTS = ("experts", "replicas")


@dataclass(frozen=True)
class Layout:
    """A division of `world` ranks.

    Attributes:
        world: the number of ranks.
        experts: ranks that the experts of a layer are divided over; each holds E / experts of them.
        replicas: whole copies of the model; gradients are summed over them.
    """

    world: int
    experts: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("world", *PARTS):
            if getattr(self, name) < 1:
                raise RunError(f"{name}={getattr(self, name)}: allowed are whole numbers from 1")
        if self.world % self.replicas:
            raise RunError(f"replicas={self.replicas} does not divide {self.world} ranks; {_divisors(self.world)} do")
        if self.shards % self.experts:
            raise RunError(f"experts={self.experts} does not divide {self.shards} ranks ({self.world} ranks / "
                           f"{self.replicas} replicas); {_divisors(self.shards)} do")  # fmt: skip

    @property
    def shards(self) -> int:
        """Ranks that one copy of the dense parameters is divided over."""
        return self.world // self.replicas

    @property
    def expert_shards(self) -> int:
        """Ranks that the same experts are divided over further, each holding a part of every tensor."""
        return self.shards // self.experts

    @classmethod
    def parse(cls, text: str, world: int) -> Layout:
        """The layout that `experts=8,replicas=2` describes; "" = everything in shards.

        RunError for an unknown part, one named twice, no whole number, or a division that does not come out even.
        """
        parts: dict[str, int] = {}
        for item in filter(None, (item.strip() for item in text.split(","))):
            name, equals, value = item.partition("=")
            if name not in PARTS:
                raise RunError(f"layout {text!r}: {name!r}: {did_you_mean(name, PARTS)}")
            if name in parts:
                raise RunError(f"layout {text!r}: {name} is given twice")
            if not equals or not value.isascii() or not value.isdigit() or len(value) > 9:
                raise RunError(f"layout {text!r}: {item!r}: write {name}=N with a whole number from 1")
            parts[name] = int(value)
        return cls(world, **parts)

    def check_experts(self, num_experts: int) -> None:
        """Raises RunError unless every rank can hold the same number of the layer's experts."""
        if num_experts % self.experts:
            raise RunError(f"experts={self.experts} does not divide the {num_experts} experts of a layer; "
                           f"{_divisors(num_experts)} do")  # fmt: skip

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in PARTS if getattr(self, name) > 1) or "shards"


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
