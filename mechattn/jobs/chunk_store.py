"""Where the workers of a job write the per-prompt values of their chunks: one store with a region for each chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mechattn.errors import OutputError
from mechattn.results.result import Result
from mechattn.store.addresses import is_address
from mechattn.store.objects import BEGUN, COMPLETE, Store, attributes_of
from mechattn.store.reading import load_result
from mechattn.store.writing import write_chunk


@dataclass(frozen=True)
class Into:
    """A store that every worker can write to.

    Args:
        place: A folder that all workers can reach, or an address.
        chunks: The chunks in the store, in order.
        chunk: The number of prompts per chunk.
        half: Store floating-point numbers in 16 bits.
        known: Digests of existing objects that must not change when a damaged chunk is written again.
        owner: The run that began writing to an address, in case another one has begun since.
    """

    place: str
    chunks: tuple[int, ...]
    chunk: int
    half: bool
    known: Mapping[str, str] | None = None
    owner: str | None = None

    @property
    def store(self) -> Store:
        """The store."""
        return Store(self.place if is_address(self.place) else Path(self.place))

    def check(self) -> None:
        """Refuse to write to an address where another run has begun since, as locks do not work there.

        One that ended since, but whose result cannot be loaded, began before this one and did not notice it.
        """
        root = {} if self.owner is None else attributes_of(self.store.place)
        if root.get(BEGUN) == self.owner:
            return
        if root.get(COMPLETE):
            try:
                load_result(self.place)
            except OutputError:
                return self.store.mark(str(self.owner))
        raise OutputError(
            f"another run has begun to write to {self.place} after this one: wait for it, give this one another "
            "output, or start it again (mechattn run --fresh, in Python fresh=True)"
        )

    def write(self, chunk: int, result: Result) -> Result:
        """Write the result of a chunk; return its small parts and a record of what was written."""
        self.check()
        return write_chunk(self.store, self.chunks.index(chunk), result, self.chunk, self.half, self.known)
