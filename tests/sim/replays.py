"""A failure of a random schedule says how to replay it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.sim import fleet
from tests.sim.fleet import Result

REPLAY = "python -m tests.sim.soak --seed {seed}"


class WorldFailed(AssertionError):
    """`seed` has broken a law, or some code of the product."""

    def __init__(self, seed: int, cause: BaseException) -> None:
        told = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        super().__init__(f"seed {seed}: {told}\nreplay it with: {REPLAY.format(seed=seed)}")
        self.seed = seed

    def __reduce__(self) -> tuple[type[AssertionError], tuple[str]]:
        return AssertionError, (str(self),)


@contextmanager
def replayable(seed: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise WorldFailed(seed, error) from error


def run(seed: int) -> Result:
    """Raises WorldFailed."""
    with replayable(seed):
        return fleet.run(seed)
