"""Where the workers of a job write what a chunk knows of each prompt: one store, in which each chunk has its region."""

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
        place: A folder that all workers see, or an address.
        chunks: The chunks that it holds, in their order.
        chunk: Prompts a chunk.
        half: Keep numbers with a point in 16 bits.
        known: Digests of objects that are there already and may not change: a damaged chunk is written again.
        owner: Who has begun to write to an address; another one may have since.
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
        """Write the result of a chunk; gives what is small of it, and what was written.

        Raises:
            OutputError: There is no room, or another run has begun to write to the same address.
        """
        if self.owner is not None:
            check_begun(self.store, self.owner)
        return write_chunk(self.store, self.chunks.index(chunk), result, self.chunk, self.half, self.known)
