"""Forms: what a folder with a checkpoint looks like, apart from the bytes of its files.

The rest of the package finds a form by its entry in `FORMS`. Files have ids; in rank folders, a
file's id is its rank. Other forms describe themselves: which files there are, which slices of
which ranks each holds, or that all tensors are whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from types import MappingProxyType
from typing import Any

from rankxform.errors import UsageError
from rankxform.formats.container import Index, TensorSpec
from rankxform.geometry.box import Shape
from rankxform.layout.names import format_ranges
from rankxform.layout.strategy import Strategy
from rankxform.planning.catalog import Description
from rankxform.planning.plan import FileContent, Planner
from rankxform.storage.store import Listing, Store, absolute
from rankxform.values import Registry, dataclass

TrainingStep = tuple[int, ...]
"""Epoch and step, or an iteration alone."""


DEFAULT_PATTERN = "rank_{rank}/*"


@dataclass(frozen=True)
class CheckpointRef:
    """Names a checkpoint: a place, and which of the files there are meant."""

    path: str = ""  # a folder or a file
    form: str | None = None  # the convention; None: it is recognized
    # Of rank folders, relative to the place, with ``{rank}`` for the rank's number and ``*``.
    pattern: str = DEFAULT_PATTERN
    # ``E_S``, a step or iteration alone, or ``latest``, which accepts no older step than the newest
    # of all.
    step: str | None = None
    suffix: str | None = None  # the end of the files' names before their extension
    # The file of each rank, in place of those that are found.
    files: Mapping[int, str] | None = None
    strategy: Strategy | None = None  # how ranks shard; None: nobody says so
    # Other places with some of its files, or all of them, the best first.
    fallbacks: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """All places where files may lie, the best first."""
        return (self.path, *self.fallbacks)

    def absolute(self) -> CheckpointRef:
        """Return the same with addresses with which every process finds the places."""
        path, *fallbacks = map(absolute, self.places)
        return replace(self, path=path, fallbacks=tuple(fallbacks))


@dataclass(frozen=True)
class RankFilter:
    """Which ranks of rank folders are needed, and which there may be.

    ranks: those that are needed (None: all that are there). among: those that belong to the
    checkpoint (None: all that are there): one that is not needed and lacks the step, or has a newer
    one, is reported too.
    """

    ranks: Collection[int] | None = None
    among: Collection[int] | None = None


@dataclass(frozen=True)
class SelectedFiles:
    """The chosen files: their names by id, "" for the place itself, and their (epoch, step)."""

    names: Mapping[int, str]
    step: TrainingStep | None = None
    skipped_steps: tuple[TrainingStep, ...] = ()  # other steps that exist
    # Of this step and newer ones, those that some ranks lack, with these ranks.
    missing_ranks: Mapping[TrainingStep, tuple[int, ...]] = field(default_factory=dict)
    # What the checkpoint says of itself; None of rank folders, which say nothing.
    description: Description | None = None
    # By id the rank that a file is of, where ranks have several files; {}: ids are ranks.
    ranks: Mapping[int, int] = field(default_factory=dict)

    def rank_of(self, file: int) -> int:
        """Return the rank that a file of rank folders is of."""
        return self.ranks.get(file, file)

    @property
    def rank_count(self) -> int:
        """How many ranks rank folders are of, if the last one is there."""
        return max(map(self.rank_of, self.names), default=-1) + 1

    @property
    def step_name(self) -> str | None:
        """The step as `--step` takes it, such as 10_73 or 100; None if no name states one."""
        return "_".join(map(str, self.step)) if self.step else None

    @property
    def incomplete_step(self) -> str | None:
        """Which step, this or a newer one, some rank lacks, in words; None if there is none."""
        if not self.missing_ranks:
            return None
        step = max(self.missing_ranks)
        state = "is newer but not complete" if step != self.step else "is not complete"
        return f"epoch {step[0]} step {step[1]} {state}: {self.lacking_in_words(step)}"

    def lacking_in_words(self, step: TrainingStep) -> str:
        """Return which ranks lack a step of `missing_ranks`."""
        ranks = self.missing_ranks[step]
        ranks_text = (
            f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {format_ranges(ranks)} have"
        )
        return f"{ranks_text} {'not all files' if self.ranks else 'no file'} of it"


@dataclass(frozen=True)
class DestinationFiles:
    """The files of a destination."""

    # Of each, by id, relative to `folder`, which is relative to the destination.
    names: Mapping[int, str]
    # What each holds; {}: a file holds all slices of the rank that is its id.
    parts: Mapping[int, FileContent] = field(default_factory=dict)
    folder: str = ""
    # A small file, relative to the destination, with its content, by which readers find `folder`;
    # it is written last.
    mark: tuple[str, bytes] | None = None
    # Names of tensors whose items have an axis of one element in front.
    stacked: frozenset[str] = frozenset()
    # What the form's own table calls tensors, by name; {}: as they are called here.
    keys: Mapping[str, str] = field(default_factory=dict)

    def as_in_files(self, tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
        """Return tensors with the shapes that they have in files."""
        return [
            tensor._replace(shape=(1, *tensor.shape)) if tensor.name in self.stacked else tensor
            for tensor in tensors
        ]


ADAPTER_MANIFEST = "mindformers_adapter_config.json"
"""What MindFormers' PyNative trainer says of an adapter, since 2.1.0."""


class Form(ABC):
    """One folder convention. It sees listings of plain names, and opens no checkpoint file.

    The defaults are those of a form that is read, and never written.
    """

    name: str  # what ``--src-form`` and ``--dst-form`` call it
    title: str  # what people call it
    # Names of the options of destinations that not every form has. A form from outside declares
    # them in a class `own_options`, as `FormOptions` does.
    options: tuple[str, ...] = ()
    container: str | None = None  # the container of its files, if it has one only
    described: bool = True  # a checkpoint declares how it is sharded: no strategy is needed
    training: str | None = None  # the companion file with facts such as global_step
    counters: bool = False  # such facts are tensors, as MindSpore's `append_dict` makes them
    configured: bool = False  # a model's config.json and its tokenizer's files belong to a folder
    tracker: str | None = None  # the file above steps' folders that names the newest complete one
    items: str = ""  # kind of what is no tensor, which other forms of that kind get; "": none
    has_table: bool = False  # a table of its own says what its files' entries are called
    is_written: bool = False  # there can be destinations of it
    # How jobs that write it join tensors, by the name of the option: "qkv", "gate_up". {}: as a
    # map's defaults say, which are MindFormers'; None: anybody may have written it.
    joins: Mapping[str, str] | None = None
    # How jobs that write it hold what a map knows in several ways, by variant.
    variants: Mapping[str, str] = MappingProxyType({})
    adapter_manifest: str = ""  # companion file that says what an adapter is for; "": none
    is_named_in_yaml: bool = False  # a MindFormers job names it by `load_checkpoint` as it is
    is_served: bool = False  # an engine starts from it: names are those of its own modules
    gives_way: bool = False  # its files may lie beside those of another form, which is meant then

    @abstractmethod
    def pattern(self, where: CheckpointRef) -> str:
        """Return which files it wants to be listed, as `rankxform.storage.store.Store.list`."""

    @abstractmethod
    def recognizes(self, listing: Listing, store: Store) -> str | None:
        """Return the file or folder by which a place is known to be of this form, or None.

        `listing` has what lies directly there, and all files among it.
        """

    @abstractmethod
    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        """Choose one file for each id, of those that are listed by `pattern`.

        Raises UsageError or CheckpointError that lists the candidates; never guesses.
        """

    def describe(
        self, description: Description, indexes: Mapping[int, Index], names: Mapping[int, str]
    ) -> Description:
        """Return what a checkpoint says of itself once the headers of its files are known, by id.

        names: the files' own. Pure, and the same on every process. Findings stand behind those of
        `description`; a form may add views of entries (`declared_files`). Raises CheckpointError.
        """
        return description

    def destination_strategy(
        self, shapes: Mapping[str, Shape], options: Mapping[str, Any]
    ) -> Strategy:
        """Return how the tensors of a destination that is served are cut.

        shapes: full shapes by name, in elements. options: as of `destination_files`. Raises
        UsageError.
        """
        raise NotImplementedError

    def destination_files(
        self, planner: Planner, options: Mapping[str, Any], step: int | None, suffix: str
    ) -> DestinationFiles:
        """Return the files of a whole destination, of which `planner` knows the slices.

        options: by name the values of the form's own, and "prefix", the start of files' names
        (None: the form's own). step: of the training; None: the source does not tell it. suffix: of
        the container, with a dot.

        Raises RequestError for what the form cannot hold, UsageError for what it has to be told.
        """
        raise UsageError(f"{self.name} is read only", "choose another --dst-form")

    def stated_options(self, description: Description) -> Mapping[str, Any]:
        """Return the values of the form's own options that a destination itself states."""
        return {}

    def metadata(self, source: Mapping[str, str]) -> Mapping[str, str]:
        """Return the metadata of a destination file, of which the source file had `source`."""
        return {}

    def owns(self, name: str, file: int) -> bool:
        """Tell whether `name`, relative to a destination, may be that file, whatever its prefix."""
        return False

    def companion_names(self, names: Collection[str]) -> tuple[str, ...]:
        """Return what else belongs to a destination whose files have these `names`."""
        return ()

    def companions(
        self, planner: Planner, arrangement: DestinationFiles, training: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        """Return small files that belong to a complete destination, by their relative names.

        The content comes in parts, one after another. They are written when all its files are
        complete. `training` are facts on the training, as in `Description`.
        """
        return {}

    def foreign_files(self, listing: Listing, dst_names: Collection[str]) -> list[str]:
        """Return names of checkpoint files that a reader may take for one of a destination's.

        `listing` is of the destination, by `pattern`; `dst_names` are the names of its own files.
        """
        return []


_PACKAGE = "rankxform.checkpoints"
FORMS: Registry[Form] = Registry(
    {
        "ranks": f"{_PACKAGE}.rank_folders:RankFoldersForm",
        "checkpoint2": f"{_PACKAGE}.checkpoint2:Checkpoint2Form",
        "unified": f"{_PACKAGE}.unified:UnifiedForm",
        "huggingface": f"{_PACKAGE}.huggingface:HuggingFaceForm",
        "dcp": f"{_PACKAGE}.dcp:DcpForm",
        "hyperparallel": f"{_PACKAGE}.dcp:HyperParallelForm",
        "dcp_safetensors": f"{_PACKAGE}.dcp:DcpSafetensorsForm",
        "torch_dist": f"{_PACKAGE}.torch_dist:TorchDistForm",
        "pytorch": f"{_PACKAGE}.pytorch:PyTorchForm",
        "megatron": f"{_PACKAGE}.megatron:MegatronForm",
        "verl": f"{_PACKAGE}.verl:VerlForm",
        "meta": f"{_PACKAGE}.meta:MetaForm",
        "vllm": f"{_PACKAGE}.vllm:VllmForm",
    },
    {
        "checkpoint2": {"is_written": True, "options": ("dedup", "iteration", "prefix")},
        "unified": {"is_written": True, "options": ("max_part",)},
        "huggingface": {"is_written": True, "options": ("max_shard", "prefix")},
        "dcp": {"is_written": True, "options": ("max_part",)},
        "hyperparallel": {"is_written": True, "options": ("iteration", "max_part")},
        "dcp_safetensors": {"is_written": False, "options": ()},
        "torch_dist": {
            "is_written": True,
            "options": ("iteration", "max_part", "transformer_impl"),
        },
        "pytorch": {"is_written": False, "options": ()},
        "megatron": {"is_written": False, "options": ()},
        "verl": {"is_written": False, "options": ()},
        "meta": {"is_written": False, "options": ()},
        "vllm": {
            "is_written": True,
            "options": (
                "tensor_parallel",
                "pipeline_parallel",
                "expert_parallel",
                "max_shard",
                "vllm_version",
                "platform",
            ),
        },
    },
)
"""All forms by name."""

_MARKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # beginnings, endings
    "checkpoint2": (
        ("latest_checkpointed_iteration", "common.json", "metadata.json", "iteration_"),
        (".safetensors",),
    ),
    "unified": (("param_name_map.json", "part0."), ()),
    "huggingface": ((), (".safetensors", ".safetensors.index.json")),
    "dcp": ((".metadata",), (".distcp",)),
    "hyperparallel": (("latest_checkpoint_iteration", "global_step_", "_rank"), ("metadata",)),
    "dcp_safetensors": ((), (".safetensors",)),
    "torch_dist": (("metadata.json", "iter_"), ()),
    "pytorch": ((), (".bin", ".bin.index.json")),
    "megatron": (("mp_rank_", "iter_"), ()),
    "verl": (("model_world_size_",), ()),
    "meta": (("consolidated.",), ()),
    "vllm": (("model-rank-", "model-pp-"), ()),
}
"""Without a name that begins or ends so, a form recognizes no folder, and need not be imported."""

DEFAULT_FORM = "ranks"


def recognize_form(listing: Listing, store: Store, option: str = "--src-form") -> Form:
    """Return the form of what lies at a place. Raises UsageError where two are recognized."""
    names = {*listing.entries, *listing.files}
    possible = (n for n in FORMS if _may_be(n, names))
    marks = {name: mark for name in possible if (mark := FORMS[name].recognizes(listing, store))}
    if len(marks) > 1:
        marks = {name: mark for name, mark in marks.items() if not FORMS[name].gives_way}
    if len(marks) > 1:
        (a, mark_a), (b, mark_b), *_ = marks.items()
        raise UsageError(
            f"may be {a} (by {mark_a}) or {b} (by {mark_b})",
            f"choose the form with {option}",
            where=listing.path,
        )
    return FORMS[next(iter(marks), DEFAULT_FORM)]


def _may_be(form: str, names: Iterable[str]) -> bool:
    """Return whether a folder with these names may be of a form, which need not be imported."""
    if form not in _MARKS:
        return True
    beginnings, endings = _MARKS[form]
    return any(name.startswith(beginnings) or name.endswith(endings) for name in names)


def form_named(name: str) -> Form:
    """Return the form of that name. Raises UsageError."""
    if name not in FORMS:
        raise UsageError(f"form {name!r} is none of {', '.join(FORMS)}")
    return FORMS[name]
