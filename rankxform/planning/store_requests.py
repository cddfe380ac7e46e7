"""How many requests object storage is asked, and what these take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankxform.values import NamedTuple

from .reads import Costs
from .upload_parts import UploadMemory

if TYPE_CHECKING:
    from .simulate import Simulation

PIECE = 8 << 20
"""Bytes of a request to read, at most."""

_OF_FILE, _OF_RUN = 3, 8
"""Requests beside parts: an upload is begun, listed, completed; the lock, the job, the manifest."""


class StoreRequests(NamedTuple):
    """Requests to object storage: those that read, at most, and about those that write."""

    reads: int
    writes: int

    @classmethod
    def of(
        cls, simulation: Simulation, bytes_by_file: list[int], memory: UploadMemory
    ) -> StoreRequests:
        """Count those of a run whose source and destination are object storage.

        bytes_by_file: of each destination file; it is sent in parts within `memory`. Neighbouring
        ranges may be one request, so that fewer read.
        """
        reads = sum(load.reads + load.read // PIECE for load in simulation.workloads)
        parts = sum(max(1, nbytes // memory.part_bytes) for nbytes in bytes_by_file)
        return cls(reads, parts + _OF_FILE * len(bytes_by_file) + _OF_RUN)

    def seconds(self, costs: Costs) -> float:
        """Return how long storage takes at least for all of them, under one prefix."""
        rates = (self.reads, costs.get_rate), (self.writes, costs.put_rate)
        return max(count / rate if rate else 0.0 for count, rate in rates)

    def price(self, costs: Costs) -> float:
        """Return what they cost."""
        return (self.reads * costs.get_price + self.writes * costs.put_price) / 1e6

    def in_words(self, costs: Costs | None) -> str:
        """Return how many they are, what they cost, and how long they take."""
        texts = [f"at most {self.reads:,} to read"] if self.reads else []
        texts += [f"about {self.writes:,} to write"] if self.writes else []
        text = ", ".join(texts)
        if costs is not None and (price := self.price(costs)):
            text += f"; they cost {price:,.2f}" if price >= 0.01 else "; they cost under 0.01"
        if costs is not None and (seconds := self.seconds(costs)) >= 1:
            text += f"; {seconds:,.0f} s at the rates of one prefix"
        return text
