"""Named meshes: which parallel axis of a job an axis of a device matrix is.

A strategy file numbers the axes of a device matrix; the network's ``shard()`` calls name them: data
parallel, tensor parallel and so on. MindSpore's compiler writes four kinds of matrix for a stage of
``dp * cp * mp`` ranks, leftmost axis slowest:

========  ====================  ============================================================
tuple     [dp * cp, mp]         ``shard(((dp, 1), (1, mp)))``; axes of size 1 are left out
layout    [dp, cp, mp]          ``shard(Layout((dp, cp, mp), ...))``; all axes are written
expert    [ranks / ep, ep]      the same ranks, regrouped for experts; all axes are written
flat      [ranks]               a parameter that is not sharded
========  ====================  ============================================================

With a mesh, the layout of a parameter is a partition spec: for each tensor axis the names of the
mesh axes that shard it, most significant first, as in ``(mp, None)``.

>>> sizes = Parallel(dp=2, mp=4)
>>> layout_of("tuple", parse_spec("(mp, None)"), sizes).printable_map
[0, -1]
>>> [str(one) for one in mesh_specs(Layout((2, 4), ((), (0,))), sizes)]
['tuple(None, mp)']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from rankxform.errors import RequestError, UsageError
from rankxform.layout.layout import MOST_RANKS, Layout
from rankxform.values import NamedTuple, dataclass, pattern_on_use

Spec = tuple[tuple[str, ...], ...]

TUPLE, LAYOUT, EXPERT, FLAT = "tuple", "layout", "expert", "flat"
MESHES = (TUPLE, LAYOUT, EXPERT, FLAT)
"""In the order of preference: a later one is meant only if no earlier one is."""

AXES = ("dp", "cp", "mp", "ep", "edp")
_DATA = ("dp", "edp", "all")
"""Axes along which ranks hold replicas of a parameter: only the optimizer shards it there."""

_WORDS = {"true": True, "false": False, "on": True, "off": False, "1": True, "0": False}


@dataclass(frozen=True)
class Parallel:
    """The sizes of a job's parallel axes, and what else its layouts depend on."""

    dp: int = 1  # data parallel size
    mp: int = 1  # tensor (model) parallel size
    pp: int = 1  # number of pipeline stages
    cp: int = 1  # context parallel size
    ep: int = 1  # expert parallel size
    vocab_emb_dp: bool | None = None  # whether the vocabulary is replicated; None: not known
    use_seq_parallel: bool | None = None  # whether sequences are sharded over mp; None: not known
    # Whether the optimizer shards parameters, or into how many shards; None: not known.
    optimizer_shard: bool | int | None = None
    # The optimizer shards no parameter of fewer KiB; None: 64, MindSpore's default.
    threshold: int | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "mp", "pp", "cp", "ep"):
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= MOST_RANKS:
                raise UsageError(f"{name} is {size!r}; expected a number from 1 on")
        if self.ranks > MOST_RANKS:
            raise UsageError(
                f"gives {self.ranks:,} ranks; expected {MOST_RANKS:,} at most", where=self
            )
        shard, threshold = self.optimizer_shard, self.threshold
        if not (shard is None or isinstance(shard, bool) or (type(shard) is int and shard > 1)):
            raise UsageError(
                f"optimizer_shard is {shard!r}; expected on, off, or a size from 2 on (MindSpore "
                "ignores 1)"
            )
        if threshold is not None and (type(threshold) is not int or threshold < 0):
            raise UsageError(f"threshold is {threshold!r}; expected a number of KiB")

    def __str__(self) -> str:
        sizes = ("dp", "mp", "pp", "cp", "ep")
        size_texts = [f"{n}={getattr(self, n)}" for n in sizes if n in ("dp", "mp") or self[n] > 1]
        return ",".join(size_texts)

    def __getitem__(self, name: str) -> int:
        return int(getattr(self, name))

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.mp

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.stage_size * self.pp

    @property
    def shards(self) -> bool:
        """Whether the optimizer shards parameters."""
        return bool(self.optimizer_shard)

    @property
    def shard_size(self) -> int | None:
        """Into how many shards the optimizer divides a slice at most; None: no limit."""
        shard = self.optimizer_shard
        return None if shard is None or isinstance(shard, bool) else shard

    @property
    def threshold_bytes(self) -> int:
        """Parameters of fewer bytes are not sharded by the optimizer."""
        return 1024 * (64 if self.threshold is None else self.threshold)


_SPELLINGS = {
    "tp": "mp", "data_parallel": "dp", "model_parallel": "mp", "tensor_parallel": "mp",
    "pipeline_stage": "pp", "context_parallel": "cp", "expert_parallel": "ep",
}  # fmt: skip
_FLAGS = ("vocab_emb_dp", "use_seq_parallel")


SRC_SIZES, DST_SIZES = "--src-parallel", "--dst-parallel"
"""The options that give the sizes of both jobs, where no configuration does."""


def parse_parallel(text: str, option: str, base_sizes: Parallel | None = None) -> Parallel:
    """Read sizes such as ``dp=2,mp=4,pp=2``, over `base_sizes`. Raises UsageError.

    >>> parse_parallel("dp=2,tp=4,vocab_emb_dp=true", "--dst-parallel").vocab_emb_dp
    True
    """
    sizes: dict[str, int | bool] = {}
    for part in text.split(",") if text else ():
        name, equals, value = (token.strip() for token in part.partition("="))
        name = _SPELLINGS.get(name, name)
        flag = name in _FLAGS
        is_size = value.isdecimal() and len(value) < 8
        size = int(value) if is_size else None
        read = _WORDS.get(value.lower()) if flag else size
        if name not in ("dp", "mp", "pp", "cp", "ep", *_FLAGS) or not equals or read is None:
            raise UsageError(
                f"{option} {text!r}: {part!r}: expected sizes such as dp=2,mp=4,pp=2",
                details="also cp and ep; vocab_emb_dp and use_seq_parallel are true or false",
            )
        if name in sizes:
            raise UsageError(f"{option} {text!r}: gives {name} twice")
        sizes[name] = read
    return replace(base_sizes or Parallel(), **sizes)  # type: ignore[arg-type]


class MeshSpec(NamedTuple):
    """A mesh, and the axes of it that shard a parameter."""

    mesh: str
    spec: Spec

    def __str__(self) -> str:
        return self.mesh + print_spec(self.spec)

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that shard the parameter."""
        return frozenset(axis for axes in self.spec for axis in axes)


def print_spec(spec: Spec) -> str:
    """Write a spec as rules take it.

    >>> print_spec((("mp",), ())), print_spec((("cp", "mp"),))
    ('(mp, None)', '((cp, mp),)')
    """
    parts = [
        "None" if not axes else axes[0] if len(axes) == 1 else f"({', '.join(axes)})"
        for axes in spec
    ]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


_SPEC = pattern_on_use(r"\(\s*((?:\([\w\s,]*\)|[\w\s,])*)\)")
_DIM = pattern_on_use(r"\(([\w\s,]*)\)|(\w+)")


def parse_spec(text: str, where: str | None = None) -> Spec:
    """Read a spec such as ``(mp, None)`` or ``((cp, mp), None)``.

    Raises UsageError, which names `where`, by default the text.
    """
    where = where or repr(text)
    match = _SPEC().fullmatch(text.strip())
    if not match:
        raise UsageError("expected a spec such as (mp, None)", where=where)
    dims: list[object] = []
    for axes_text, axis_name in _DIM().findall(match[1]):
        dims.append(
            axis_name or tuple(part.strip() for part in axes_text.split(",") if part.strip())
        )
    return validate_spec(dims, where)


def validate_spec(dims: object, where: object) -> Spec:
    """Turn names by tensor axis, None or "None" for no axis, into a spec. Raises UsageError."""
    if not isinstance(dims, (tuple, list)):
        raise UsageError("expected a spec such as (mp, None)", where=where)
    spec = []
    for dim in dims:
        names = dim if isinstance(dim, (tuple, list)) else (dim,)
        names = ["mp" if name == "tp" else name for name in names if name not in (None, "None")]
        for name in names:
            if name not in AXES:
                raise UsageError(f"{name!r} is none of the axes {', '.join(AXES)}", where=where)
        spec.append(tuple(names))
    used_axes = [name for names in spec for name in names]
    if len(set(used_axes)) < len(used_axes):
        raise UsageError("uses one axis twice", where=where)
    return tuple(spec)


def mesh_axes(mesh: str, parallel: Parallel) -> tuple[tuple[str, int], ...] | None:
    """Return the axes of a mesh, slowest first; None where the ranks do not divide into it."""
    ranks = parallel.stage_size
    if mesh == TUPLE:
        axes = (("dp", parallel.dp * parallel.cp), ("mp", parallel.mp))
        return tuple(axis for axis in axes if axis[1] > 1) or (("all", 1),)
    if mesh == LAYOUT:
        return ("dp", parallel.dp), ("cp", parallel.cp), ("mp", parallel.mp)
    if mesh == EXPERT:
        if ranks % parallel.ep:
            return None
        return ("edp", ranks // parallel.ep), ("ep", parallel.ep)
    return (("all", ranks),)


def sizes_of(parallel: Parallel) -> Mapping[str, int]:
    """Return the size of every axis that a spec may name."""
    return {
        "dp": parallel.dp, "cp": parallel.cp, "mp": parallel.mp, "ep": parallel.ep,
        "edp": max(1, parallel.stage_size // parallel.ep),
    }  # fmt: skip


def layout_of(mesh: str, spec: Spec, parallel: Parallel) -> Layout:
    """Return the layout that the compiler writes for a spec, without an optimizer shard.

    Raises RequestError where the mesh does not exist for these sizes, or lacks an axis of the spec.
    """
    axes = mesh_axes(mesh, parallel)
    if axes is None:
        raise RequestError(
            f"ep={parallel.ep} does not divide the {parallel.stage_size} ranks of a stage"
        )
    position = {name: len(axes) - 1 - index for index, (name, _) in enumerate(axes)}
    sizes = sizes_of(parallel)
    missing_axes = [n for names in spec for n in names if n not in position and sizes[n] > 1]
    if missing_axes:
        raise RequestError(f"the mesh {mesh!r} has no axis {missing_axes[0]}")
    tensor_map = tuple(tuple(position[n] for n in names if n in position) for names in spec)
    return Layout(tuple(size for _, size in axes), tensor_map)


def mesh_specs(layout: Layout, parallel: Parallel) -> list[MeshSpec]:
    """Return what a layout may mean: the meshes of its device matrix, with their axes' names.

    A mesh is left out if its data axes would shard the parameter, which only the optimizer does.
    """
    candidates = []
    for mesh in MESHES:
        axes = mesh_axes(mesh, parallel)
        if axes is None or tuple(size for _, size in axes) != layout.device_matrix:
            continue
        names = [name for name, _ in reversed(axes)]
        spec = tuple(tuple(names[axis] for axis in dims) for dims in layout.tensor_map)
        if not any(name in _DATA for dims in spec for name in dims):
            candidates.append(MeshSpec(mesh, spec))
    return candidates


def override_sizes(sizes: Parallel, overrides: Mapping[str, object]) -> Parallel:
    """Return sizes with those fields replaced that are given (not None)."""
    fields_given = {
        f.name: overrides[f.name] for f in fields(Parallel) if overrides.get(f.name) is not None
    }
    return replace(sizes, **fields_given)  # type: ignore[arg-type]
