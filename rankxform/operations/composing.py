"""Tensors made of parts of others, of which some are made of parts already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rankxform.geometry.pieces import Assembly

from .base import SourceTensor, Tensor

Build = Callable[[list[Assembly]], Assembly]
"""Makes one tensor of others, all of which count the same sources."""


class Composer:
    """Makes tensors of others; those that are made alike share one assembly."""

    def __init__(self) -> None:
        self._assemblies: dict[object, Assembly] = {}

    def compose(self, name: str, parts: Sequence[Tensor], how: object, build: Build) -> Tensor:
        """Return one tensor of parts; how: what `build` does, beyond the parts."""
        numbers: dict[SourceTensor, int] = {}
        for part in parts:
            for source in part.sources:
                numbers.setdefault(source, len(numbers))
        key = how, tuple((p.made_of, tuple(numbers[s] for s in p.sources)) for p in parts)
        if key not in self._assemblies:
            self._assemblies[key] = build(
                [_renumbered(p.made_of, [numbers[s] for s in p.sources]) for p in parts]
            )
        assembly = self._assemblies[key]
        return Tensor(name, parts[0].dtype, assembly.shape, tuple(numbers), assembly)


def _renumbered(assembly: Assembly, numbers: Sequence[int]) -> Assembly:
    pieces = (replace(piece, source=numbers[piece.source]) for piece in assembly.pieces)
    return Assembly(assembly.shape, tuple(pieces))
