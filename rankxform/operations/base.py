"""How destination tensors come from source tensors: one derivation, applied before planning.

A derivation is a chain of operations, each a pure function of tensors, the same on every process.
Most change one tensor at a time: its name, its type, or whether it is written. Others see all
tensors, and compose new ones of pieces of them (`rankxform.geometry.pieces`). Identity costs
nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankxform.errors import RequestError
from rankxform.formats.container import Schema
from rankxform.geometry.box import Shape
from rankxform.geometry.pieces import Assembly
from rankxform.layout.states import Related, State, States
from rankxform.layout.strategy import Strategy
from rankxform.statements import Finding
from rankxform.values import dataclass

if TYPE_CHECKING:
    from rankxform.formats.map_table import MapTable

NO_STATES = States()


@dataclass(frozen=True)
class LowRankUpdate:
    """A product to be added to a matrix: ``scale * (b @ a)``."""

    # a, b: names of tensors of the adapter, of shapes (r, in) and (out, r)
    a: str
    b: str
    scale: float
    # The matrix is stored as (in, out), so that the transposed product is added.
    transposed: bool = False
    # To a stack of matrices of shape (E, in, out) ``scale * (a @ b)`` is added, of shapes (E, in,
    # r) and (E, r, out)
    is_stacked: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors that it takes besides the one that it changes."""
        return self.a, self.b


@dataclass(frozen=True)
class BlockScale:
    """Factors for blocks of a matrix: element (i, j) times ``scales[i // rows, j // columns]``.

    scales: name of a source tensor of type Float32. block: (rows, columns).
    """

    scales: str
    block: tuple[int, int]

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors that it takes besides the one that it changes."""
        return (self.scales,)


@dataclass(frozen=True)
class ScaledRows:
    """A matrix with a product added, whose rows then get other lengths: ``m * w / |w|`` (DoRA).

    update: what is added. matrix: the name of the matrix itself, of which rows are read whole.
    """

    update: LowRankUpdate
    lengths: str
    matrix: str

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors that it takes besides the part of the matrix that it changes."""
        return *self.update.operands, self.lengths, self.matrix


@dataclass(frozen=True)
class ExpertUpdate:
    """Products to be added to the matrices of a layer's experts, as PEFT keeps them in two.

    To expert e of E ``scale * b[:, e::E] @ a[e * r : (e + 1) * r]`` is added, of shapes (out, r E)
    and (E r, in).
    """

    a: str
    b: str
    scale: float
    experts: int
    transposed: bool = False  # the transposed products are added
    # Of one matrix its expert, and the row of the product with which it begins; None: the tensor
    # has those of all experts along its first axis.
    expert: int | None = None
    first_row: int = 0

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors that it takes besides the one that it changes."""
        return self.a, self.b


@dataclass(frozen=True)
class Replacement:
    """Values that take the place of a tensor's, or of some of its rows.

    rows: by row of the tensor that of `values`; None: all, in their order.
    """

    values: str
    rows: Mapping[int, int] | None = None

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors that it takes besides the one that it changes."""
        return (self.values,)

    def __hash__(self) -> int:
        return hash(self.values)  # equal steps have equal ones; a mapping has none


@dataclass(frozen=True)
class VectorUpdate:
    """A vector to be added to another: ``scale * vector``."""

    vector: str
    scale: float

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors that it takes besides the one that it changes."""
        return (self.vector,)


AdapterStep = LowRankUpdate | ScaledRows | ExpertUpdate | Replacement | VectorUpdate
Computation = AdapterStep | BlockScale
"""What is done to the elements of a source tensor when they are copied, in higher precision."""


@dataclass(frozen=True)
class SourceTensor:
    """A source tensor, by its name in the files; its type there, and its full shape.

    dtype: the type of its elements when the step is done.
    """

    name: str
    src_dtype: str
    shape: Shape
    step: Computation | None = None
    dtype: str = ""


@dataclass(frozen=True)
class Tensor(Related):
    """A tensor being derived: its name, type and full shape at the destination."""

    name: str
    dtype: str
    shape: Shape
    sources: tuple[SourceTensor, ...]  # the source tensors that it is made of
    assembly: Assembly | None = None  # how; None: it is the one source as it is
    dropped: str = ""  # why it is not written, or ""
    keeps_dtype: bool = False  # it is never cast
    vocabulary: bool = False  # its rows are the vocabulary's
    same_as: str = ""  # the source tensor that one which is dropped repeats
    related: State | None = None  # what it is to another parameter
    is_weight: bool = True  # neither a state nor a counter

    @classmethod
    def of(
        cls, name: str, dtype: str = "", shape: Shape = (), states: States = NO_STATES
    ) -> Tensor:
        """Return a source tensor as it is; `states` are the source's."""
        sources = (SourceTensor(name, dtype, shape),)
        related, is_weight = states.related.get(name), states.is_weight(name)
        return cls(name, dtype, shape, sources, related=related, is_weight=is_weight)

    def renamed(self, name: str, parameter: str | None = None) -> Tensor:
        """Return the tensor under another name; `parameter`: that which it belongs to, if any."""
        related = self.related
        if related is not None:
            default_parameter = related.parameter if related.is_copy else name
            related = related.renamed(default_parameter if parameter is None else parameter)
        if related is not None and related.is_copy and name.endswith(related.parameter):
            related = related._replace(before=name.removesuffix(related.parameter))
        return replace(self, name=name, related=related)

    @property
    def made_of(self) -> Assembly:
        """How it is made of its sources."""
        return self.assembly or Assembly.of(self.shape)


TensorOperation = Callable[[Tensor], Tensor]
"""Returns the tensor with what it changes. The new name must depend on the old name alone, so that
strategies, which know names only, can be renamed alike; a dropped tensor is renamed too."""


class ModelOperation(ABC):
    """An operation that sees all tensors, and returns those that they become.

    Tensors that are dropped already are passed too, and are to be returned. renames: whether
    tensors get names that others have, or are made of several; otherwise names stay.
    """

    renames: bool

    @abstractmethod
    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what the tensors become. Raises RequestError or CheckpointError."""

    def without(self, tensors: Sequence[Tensor]) -> ModelOperation:
        """Return the same for a part of a checkpoint that has other `tensors`, known by name."""
        return self

    def findings(self, names: Sequence[str]) -> Iterator[Finding]:
        """Yield what it assumes or doubts, once tensors are composed; `names`: the checkpoint's."""
        return iter(())

    def in_words(self) -> str:
        """Return what a report says of it, if that is more than its options; else ""."""
        return ""

    def truncated(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return those of derived tensors that lose rows by it."""
        return []


class OperationContext(ABC):
    """A request, and what its operations may read of files. On process 0, before a source is open.

    Operations stand below the packages that read files, which implement this.
    """

    options: Mapping[str, Any]  # the request's, by name

    @property
    @abstractmethod
    def config(self) -> tuple[Mapping[str, Any], str] | None:
        """The model's config.json, given or in a folder, and where it is. Raises UsageError."""

    @property
    @abstractmethod
    def model_folder(self) -> str:
        """Where the configuration lies that is not given: the reference's folder, or the source."""

    @abstractmethod
    def other_configs(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield the configurations of the source and the reference, and where each is."""

    @abstractmethod
    def place_of(self, path: str) -> str | None:
        """Return the absolute path of a file or folder, or an address; None if nothing is there."""

    @abstractmethod
    def config_at(self, place: str, name: str) -> tuple[Mapping[str, Any], str] | None:
        """Return what a JSON file holds that lies at a place, or beside a file, and where it is;
        None if there is none. Raises UsageError."""

    @abstractmethod
    def map_table(self, name: str) -> MapTable:
        """Return a mapping table that comes with rankxform, or a file's. Raises UsageError."""

    @abstractmethod
    def adapter_manifest(
        self, place: str, step: str | None = None
    ) -> tuple[Mapping[str, Any], str] | None:
        """Return what MindFormers' trainer says of an adapter, and where; None without it."""

    @abstractmethod
    def states_its_strategy(self, place: str) -> bool:
        """Tell whether a checkpoint is one file, or of a form that says how it is sharded."""

    @property
    @abstractmethod
    def is_configured(self) -> bool:
        """Whether a model's config.json belongs to the destination."""

    @property
    @abstractmethod
    def is_served(self) -> bool:
        """Whether an engine starts from the destination."""

    @abstractmethod
    def is_source(self, place: str) -> bool:
        """Tell whether a path is the source's."""


OPERATIONS: dict[str, Callable[[Mapping[str, Any]], TensorOperation | ModelOperation | None]] = {}
"""Makes an operation of the options of a conversion, None where they do not ask for it; in the
order in which they are applied; filled in the package's `__init__`.

One that is no part of rankxform declares its options in a class `own_options`, as
`OperationOptions` does. What it needs of files, process 0 reads with its method ``read(context)``;
every process finds that in ``options["inputs"]``, under the operation's name.
"""


class ImportedOperation:
    """An operation whose module is imported where one of its options is given.

    The module has `make`, which takes options, and `read`, which takes an `OperationContext`, where
    it needs anything of files.
    """

    def __init__(self, name: str, *asked_by: str) -> None:
        self._name, self._asked_by = name, asked_by

    def read(self, context: OperationContext) -> Any:
        stated_values = map(context.options.get, self._asked_by)
        if all(value is None or value is False or value == () for value in stated_values):
            return None
        return getattr(self._module, "read", lambda context: ())(context)

    def __call__(self, options: Mapping[str, Any]) -> TensorOperation | ModelOperation | None:
        if options.get("inputs", {}).get(self._name) is None:
            return None
        operation: TensorOperation | ModelOperation | None = self._module.make(options)
        return operation

    @property
    def _module(self) -> Any:
        return import_module(f"rankxform.operations.{self._name}")


def read_inputs(context: OperationContext) -> dict[str, Any]:
    """Return what operations need of files, by their names. Raises UsageError."""
    readers = {n: o.read for n, o in OPERATIONS.items() if hasattr(o, "read")}
    inputs = {name: read(context) for name, read in readers.items()}
    return {name: value for name, value in inputs.items() if value is not None}


class OperationChain:
    """The operations of one conversion."""

    def __init__(
        self,
        operations: Iterable[TensorOperation | ModelOperation] = (),
        states: States = NO_STATES,
    ) -> None:
        self._operations, self._states = tuple(operations), states
        self._of_names: list[TensorOperation] = []
        self._named: dict[str, Tensor] = {}
        for operation in self._operations:
            if not isinstance(operation, ModelOperation):
                self._of_names.append(operation)
            elif operation.renames:
                break

    @classmethod
    def of(cls, options: Mapping[str, Any], states: States = NO_STATES) -> OperationChain:
        """Return what the options of a conversion ask for, of a source with these states.

        Raises UsageError.
        """
        operations = (make(options) for make in OPERATIONS.values())
        return cls((operation for operation in operations if operation is not None), states)

    def with_states(self, states: States) -> OperationChain:
        """Return the same operations for a source that has these states."""
        return OperationChain(self._operations, states)

    def without(self, src_names: Collection[str]) -> OperationChain:
        """Return the same operations for a source of which tensors of these names were not read."""
        tensors = [*map(self.tensor_by_name, src_names)]
        return OperationChain(
            (o.without(tensors) if isinstance(o, ModelOperation) else o for o in self._operations),
            self._states,
        )

    @property
    def renames(self) -> bool:
        """Whether destination tensors may have other names than the source's name operations give
        them, or be made of several."""
        return any(operation.renames for operation in self.compositions)

    @property
    def compositions(self) -> list[ModelOperation]:
        """The operations that see all tensors."""
        return [o for o in self._operations if isinstance(o, ModelOperation)]

    def __call__(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return what source tensors become."""
        new_tensors = list(tensors)
        for operation in self._operations:
            if isinstance(operation, ModelOperation):
                new_tensors = operation.compose(new_tensors)
            else:
                new_tensors = [operation(tensor) for tensor in new_tensors]
        if self.compositions:
            _check_names(new_tensors)
        return new_tensors

    def tensor_by_name(self, src_name: str) -> Tensor:
        """Return what becomes of a source tensor as far as its name alone tells."""
        if src_name not in self._named:  # the same names are asked for again with every stage
            tensor = Tensor.of(src_name, states=self._states)
            for operation in self._of_names:
                tensor = operation(tensor)
            self._named[src_name] = tensor
        return self._named[src_name]

    def name_of(self, src_name: str) -> str:
        """Return the name that a source tensor gets before tensors are composed, written or not."""
        return self.tensor_by_name(src_name).name if self._of_names else src_name

    def drops(self, src_name: str) -> bool:
        """Tell whether a source tensor of this name is not written."""
        return bool(self.tensor_by_name(src_name).dropped)

    def strategy(self, src: Strategy) -> Strategy:
        """Return a source strategy under the names that its parameters get. Raises RequestError."""
        new = self._renamed(src.stages_of)
        stages = [{new[old]: layout for old, layout in layouts.items()} for layouts in src.stages]
        is_unchanged = all(list(a) == list(b) for a, b in zip(stages, src.stages))
        return src if is_unchanged else replace(src, stages=tuple(stages))

    def schemas(self, schemas: Mapping[int, Schema]) -> Mapping[int, Schema]:
        """Return the schemas of files with the names that their tensors get."""
        renamed = {
            schema: Schema(tuple(map(self.name_of, schema.names)), schema.dtypes, schema.shapes)
            for schema in dict.fromkeys(schemas.values())
        }
        return {file: renamed[schema] for file, schema in schemas.items()}

    def check_names(self, src_names: Iterable[str]) -> None:
        """Raise RequestError where two tensors, of the files or the strategy, get one name."""
        self._renamed(src_names)

    def _renamed(self, names: Iterable[str]) -> dict[str, str]:
        if not self._of_names:
            return {name: name for name in names}
        new_names: dict[str, str] = {}
        owner: dict[str, str] = {}
        for name in names:
            new_names[name] = new = self.name_of(name)
            first_name = owner.setdefault(new, name)
            if first_name != name:
                raise RequestError(
                    f"{first_name!r} and {name!r} would both be called {new!r}",
                    "change --rename so that each parameter has a name of its own",
                )
        return new_names


def _check_names(tensors: Iterable[Tensor]) -> None:
    """Refuse two tensors of one name. Raises RequestError."""
    owner: dict[str, Tensor] = {}
    for tensor in tensors:
        if not tensor.dropped:
            first = owner.setdefault(tensor.name, tensor)
            if first is not tensor:
                a, b = (", ".join(source.name for source in t.sources) for t in (first, tensor))
                raise RequestError(f"{tensor.name!r} would be made twice: of {a}, and of {b}")


def tied_duplicates(tensors: Sequence[Tensor]) -> tuple[tuple[str, str], ...]:
    """Return the source tensors that are left out as the same as another, with that one.

    Steps of parameters only where one of them is written.
    """
    written = {s.name for t in tensors if not t.dropped for s in t.sources}
    return tuple(
        (tensor.sources[0].name, tensor.same_as)
        for tensor in tensors
        if tensor.same_as and (tensor.state is None or tensor.same_as in written)
    )
