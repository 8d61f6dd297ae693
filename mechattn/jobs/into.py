"""Where the workers of a job write the per-prompt values of their chunks: one store with a region for each chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mechattn.results.addresses import is_address
from mechattn.results.large_store import Store, check_begun
from mechattn.results.large_writing import write_chunk
from mechattn.results.result import Result


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

    def write(self, chunk: int, result: Result) -> Result:
        """Write the result of a chunk; return its small parts and a record of what was written.

        Raises:
            OutputError: There is no space, or another run has begun to write to the same address.
        """
        if self.owner is not None:
            check_begun(self.store, self.owner)
        return write_chunk(self.store, self.chunks.index(chunk), result, self.chunk, self.half, self.known)
