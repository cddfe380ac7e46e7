"""Parameters of the destination, made of those of the source as a derivation says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rankxform.geometry.pieces import Assembly, PieceTiling
from rankxform.ops.base import OperationChain, Tensor

from .catalog import Catalog, Parameter
from .sharding import ComposedSharding, Sharding


def apply_operations(catalog: Catalog, derivation: OperationChain) -> list[Tensor]:
    """Return what becomes of the source's tensors, those dropped too."""
    states = catalog.states
    return derivation(
        Tensor.of(p.src_name, p.src_dtype, p.shape, states) for p in catalog.parameters
    )


class ParameterFactory:
    """Makes parameters of tensors, with one sharding for all that are composed alike."""

    def __init__(self, catalog: Catalog) -> None:
        self._assemblies: dict[object, Assembly] = {}
        self._stored = {parameter.src_name: parameter for parameter in catalog.parameters}
        self._known: dict[object, ComposedSharding] = {}

    def parameter(self, tensor: Tensor) -> Parameter:
        """Return a parameter, under its name and type at the destination."""
        sources = [self._stored[source.name] for source in tensor.sources]
        steps = tuple(source.step for source in tensor.sources)
        if tensor.assembly is None and not any(steps):
            (source,) = sources
            if (source.name, source.dtype) == (tensor.name, tensor.dtype):
                return source
            return replace(
                source, name=tensor.name, dtype=tensor.dtype, related=tensor.related,
                is_weight=tensor.is_weight,
            )  # fmt: skip
        return Parameter(
            tensor.name,
            tensor.dtype,
            self._composed(self._assembly(tensor), sources),
            sources[0].src_name,
            sources[0].src_dtype,
            tuple(source.src_name for source in sources),
            steps,
            related=tensor.related,
            is_weight=tensor.is_weight,
        )

    def _assembly(self, tensor: Tensor) -> Assembly:
        """Return how a tensor is made: one object for tensors as they are of one shape."""
        if tensor.assembly is not None:
            return tensor.assembly
        if tensor.shape not in self._assemblies:
            self._assemblies[tensor.shape] = tensor.made_of
        return self._assemblies[tensor.shape]

    def _composed(self, assembly: Assembly, sources: Sequence[Parameter]) -> ComposedSharding:
        shardings = [_stored(source) for source in sources]
        key = id(assembly), tuple(map(id, shardings))
        if key not in self._known:
            grid = PieceTiling(assembly, [sharding.grid for sharding in shardings])
            self._known[key] = ComposedSharding(grid, shardings)
        return self._known[key]


def _stored(parameter: Parameter) -> Sharding:
    assert isinstance(parameter.sharding, Sharding), "a tensor of the catalog lies in the files"
    return parameter.sharding


def by_source(parameters: Iterable[Parameter]) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the parameters by the name of their first source tensor.

    Destination files have their tensors in the order of the source tensors.
    """
    names_by_source: dict[str, list[str]] = {}
    for parameter in parameters:
        names_by_source.setdefault(parameter.src_name, []).append(parameter.name)
    return {src_name: tuple(names) for src_name, names in names_by_source.items()}
