"""What the manifest and the kept strategy say.

A compiled strategy has its own place, which rankxform does not choose. One that was derived is
written beside the destination when the files have their names; a file of that name that describes
another destination never stays there unnoticed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from posixpath import basename, exists
from typing import TYPE_CHECKING, Any

from rankxform.errors import CheckpointError, RankxformError, StorageError, UsageError
from rankxform.formats.container import Schema
from rankxform.layout.layout import same_boxes
from rankxform.layout.names import STEPS, format_ranges
from rankxform.layout.strategy import Strategy
from rankxform.options import (
    AFFECTS_BYTES,
    AFFECTS_COMPARISON,
    TYPE_RANKS,
    flag_of,
    flags_of,
    option_info,
)
from rankxform.planning.catalog import Catalog, ComposedSharding, Parameter
from rankxform.planning.evidence import ContentDigest, DigestsByFile
from rankxform.publish.files import digest_of
from rankxform.publish.records import manifest_contents
from rankxform.request import Request, all_options, options_affecting
from rankxform.source.source import Source
from rankxform.statements import join
from rankxform.storage.identity import is_same_file, sample_at
from rankxform.storage.posix import read_bytes, remove_if_possible, write_atomically
from rankxform.storage.store import absolute, address_of, scheme_of, store_at
from rankxform.storage.user_files import (
    encode_strategy,
    is_strategy,
    load_strategy,
    path_of,
    strategy_files_at,
)
from rankxform.target.target import Conversion
from rankxform.values import blake2b

from .target import Target

if TYPE_CHECKING:
    from rankxform.planning.certificate import PlanProof

_FEW_FILES = 16

# -- identity: two conversions are the same if their output is, byte for byte ---------------------


def conversion_identity(conversion: Conversion) -> dict[str, Any]:
    """Return, for JSON, what determines the bytes of the destination files.

    Which destination ranks are made, and how, is left out: neither changes what is in a file.
    """
    request, source, target = conversion.request, conversion.source, conversion.target
    planner, adapter = target.planner, target.adapter
    options = {name: getattr(request, name) for name in options_affecting(AFFECTS_BYTES)}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    identity = {
        "options": {**plain, "format": target.container.name},
        "source": source.where.path if request.files is None else None,
        "step": source.selected.step_name,
        "source strategy": description_digest(planner.catalog),
        "destination strategy": strategy_digest(planner.dst),
        "tensors": _tensors(planner.selection.parameters),
        "source files": _files(source, target.evidence.digests_by_file),
    }
    if adapter is not None:
        identity["adapter files"] = _files(adapter, {})
        identity["adapter sample"] = adapter_digest(adapter)
        identity["adapter strategy"] = description_digest(adapter.require_catalog())
    return identity


def manifest_statements(
    conversion: Conversion, copied_names: Sequence[str], proof: PlanProof | None
) -> dict[str, Any]:
    """Return what a manifest says of a conversion, beside its identity and its files.

    copied_names: of the model's small files that were written. proof: of the plan, if it was.
    """
    request, target = conversion.request, conversion.target
    # an index or metadata says it of other forms, and its digest is kept
    has_contents = request.verify or not target.form.described
    content_fields = manifest_contents(target.planner, target.files) if has_contents else {}
    steps = {n: v for n in STEPS if isinstance(v := target.training.get(n), int)}
    steps |= {fact.subject: fact.value for fact in target.evidence.steps}
    companion_digests = {n: digest_of(d) for n, d in target.companions.items()}
    fields = {
        **content_fields,
        "ranks": len(target.arrangement.names),
        "verify": verify_options(conversion),
        "step": steps,
        "accepted": request.accept,
    }
    fields |= {} if proof is None else {"proof": proof.digest}
    fields |= {"beside": companion_digests, "copied": copied_names} if companion_digests else {}
    source_manifest = conversion.source.manifest
    applied = [*source_manifest.applied] if source_manifest is not None else []
    if target.adapter is not None and (digest := adapter_digest(target.adapter)) is not None:
        applied.append(digest)
    return fields | ({"applied": applied} if applied else {})


def adapter_digest(adapter: Source) -> str | None:
    """Return a digest of samples of an adapter's first files, by which its copies are known again.

    None where they cannot be read.
    """
    state, first = blake2b(digest_size=16), [*adapter.paths.values()][:_FEW_FILES]
    try:
        for path in first:
            state.update(sample_at(path).encode())
    except StorageError:
        return None
    return state.hexdigest()


def check_not_applied(source: Source, adapter: Source) -> None:
    """Refuse to add an adapter that a source has in it by its manifest."""
    applied_digests = source.manifest.applied if source.manifest is not None else ()
    if applied_digests and adapter_digest(adapter) in applied_digests:
        assert source.manifest is not None
        raise CheckpointError(
            f"{source.manifest.label} says that {adapter.where.path} was added to these tensors "
            "already",
            "leave out --lora",
            "--accept contradictions adds it again",
        )


def _files(source: Source, digests_by_file: DigestsByFile) -> dict[str, Any]:
    places = source.where.places
    return {
        _key(source, file): {
            "file": source.paths[file].removeprefix(f"{places[source.place_of.get(file, 0)]}/"),
            "size": index.size,
            "modified": index.modified,
            **_sample_digests(digests_by_file.get(file, {}), index.schema),
        }
        for file, index in source.indexes.items()
    }


def _key(source: Source, file: int) -> str:
    """Return by what a source file is known: its id, or its rank and name where ranks have several.

    The ids of those depend on which files are there.
    """
    if not source.selected.ranks:
        return str(file)
    return f"{source.selected.rank_of(file)}, {basename(source.paths[file])}"


def _sample_digests(
    digests_by_tensor: Mapping[str, ContentDigest], schema: Schema
) -> dict[str, Any]:
    """Return a digest of which tensors of a file were looked at, and one of what it holds of them.

    Another request may look at others, and then the second says nothing. all: whether every tensor
    was looked at.
    """
    if not digests_by_tensor:
        return {}
    names, contents = blake2b(digest_size=4), blake2b(digest_size=16)
    for name in sorted(digests_by_tensor):
        names.update(f"{name!r}".encode())
        contents.update(digests_by_tensor[name].digest)
    digest_fields = {"sampled": names.hexdigest(), "sample": contents.hexdigest()}
    return (
        {**digest_fields, "all": True}
        if digests_by_tensor.keys() >= schema.position.keys()
        else digest_fields
    )


def _tensors(parameters: Iterable[Parameter]) -> str | None:
    """Return a digest of how tensors are made of others, whatever said so; None if none is."""
    state, pieces_digests = blake2b(digest_size=16), dict[ComposedSharding, bytes]()
    changed_parameters = [
        p
        for p in parameters
        if p.composed_sharding or (p.name, p.dtype) != (p.src_name, p.src_dtype)
    ]
    for parameter in changed_parameters:
        composed, names = parameter.composed_sharding, parameter.src_names or (parameter.src_name,)
        if composed is not None and composed not in pieces_digests:
            encoded_pieces = repr(_plain(composed.pieces.assembly)).encode()
            pieces_digests[composed] = blake2b(encoded_pieces, digest_size=16).digest()
        facts = parameter.name, parameter.dtype, names, _plain(parameter.steps)
        state.update(f"\n{facts!r}".encode())
        state.update(pieces_digests[composed] if composed is not None else b"")
    return state.hexdigest() if changed_parameters else None


def description_digest(catalog: Catalog) -> str:
    """Return a digest of what a source's strategy, or its stated boxes, say."""
    if catalog.strategy is not None:
        return strategy_digest(catalog.strategy)
    state = blake2b(digest_size=16)
    for name, boxes in sorted(catalog.description.boxes.items()):
        state.update(f"\n{name!r} {_plain(boxes)!r}".encode())
    return state.hexdigest()


def strategy_digest(strategy: Strategy) -> str:
    """Return a digest of what a strategy says, whatever file said it."""
    written = cache(lambda layout: repr(_plain(layout)))
    state = blake2b(f"{strategy.stage_size}".encode(), digest_size=16)
    for stage, layouts in enumerate(strategy.stages):
        for name in sorted(layouts):
            state.update(f"\n{stage} {name!r} {written(layouts[name])}".encode())
    return state.hexdigest()


def _plain(value: Any) -> Any:
    """Return a value as tuples of its fields: its text has no name of a class or a field."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    names = getattr(value, "__dataclass_fields__", None)
    return value if names is None else tuple(_plain(getattr(value, name)) for name in names)


# -- the command that verifies --------------------------------------------------------------------


_OF_SLICES = (
    "src_config", "src_threshold", "preset", "unproven", "rule", "opt_on", "opt_off", "unsharded",
)  # fmt: skip
"""What a source's strategy is derived from, of slices."""


def verify_options(conversion: Conversion) -> list[str]:
    """Return the options of a `verify` that compares the destination with this source."""
    request, source, target = conversion.request, conversion.source, conversion.target
    derives = target.derived or request.derives  # before, as `launch` does, or now
    dst_strategy = target.planner.dst if derives else request.dst_strategy
    words = _strategy_words(request.src_strategy, dst_strategy)
    compared = {o.name for o in all_options() if AFFECTS_COMPARISON in option_info(o).affects}
    words += option_words(request, compared)
    if source.where.strategy is not None and request.src_strategy is None:
        words += option_words(request, _OF_SLICES)
    if source.selected.step_name:  # a newer one may be there by then
        words += _words("step", source.selected.step_name)
    return words


def transform_command(conversion: Conversion, processes: int) -> list[str]:
    """Return the words of a `transform` that makes this destination, or continues it.

    [] where a program gave a strategy or the files of ranks that no words name.
    """
    request = conversion.request
    strategies = request.src_strategy, request.dst_strategy
    if request.files is not None or any(isinstance(strategy, Strategy) for strategy in strategies):
        return []
    names = {o.name for o in all_options() if "transform" in option_info(o).verbs}
    words = _strategy_words(*strategies)
    words += option_words(request, names - {"costs", "step", *_NOT_TOLD})
    if step := conversion.source.selected.step_name or request.step:
        words += _words("step", step)
    words += ["-n", str(processes)] if processes > 1 else []
    places = conversion.source.where.path, absolute(str(request.dst))
    return ["rankxform", "transform", *places, *words]


_NOT_TOLD = "endpoint_url", "storage_option"
"""How object storage is reached is another person's own affair."""
_PATHS = ("FILE", "FOLDER", "NAME", "PLACE", "STRATEGY")
"""How help calls options that may be paths."""


def _strategy_words(src: str | Strategy | None, dst: str | Strategy | None) -> list[str]:
    words = []
    for side, strategy, placeholder in (("src_strategy", src, "A"), ("dst_strategy", dst, "B")):
        path = path_of(strategy)
        if isinstance(strategy, Strategy):
            # one from a network is in no file; a derived one is called by the path where it is kept
            is_saved = strategy.derived and Path(strategy.label).is_absolute()
            words += _words(side, strategy.label if is_saved else placeholder)
        elif strategy is not None:
            words += _words(side, str(path.absolute()) if path else strategy)
    return words


def option_words(request: Request, names: Collection[str]) -> Iterator[str]:
    """Yield the options of these names that are not as they are by default, with absolute paths."""
    for declared in all_options():
        kind, value = option_info(declared).kind, getattr(request, declared.name)
        if declared.name not in names or value == declared.default:
            continue
        if kind.stands_for is not None:
            yield flags_of(declared)[0]
            continue
        texts = value if kind.repeated else [value]
        if kind is TYPE_RANKS:
            texts = [format_ranges(value).replace(" ", "")]
        elif kind.is_tuple and not kind.repeated:
            texts = [",".join(map(str, value))]
        for text in map(str, texts):
            is_there = option_info(declared).metavar in _PATHS and exists(text)
            yield from _words(declared.name, absolute(text) if is_there else text)


def _words(name: str, value: str) -> list[str]:
    flag = flag_of(name)
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]


def verify_command(manifest: Mapping[str, Any], folder: str) -> str:
    """Return the command that compares `folder`, whose manifest is given, with its source."""
    options = manifest.get("verify")
    if not isinstance(options, list) or not all(isinstance(word, str) for word in options):
        options = ["--src-strategy", "A", "--dst-strategy", "B"]
    ranks = sorted({file_entry["id"] for file_entry in manifest["files"].values()})
    total = manifest.get("ranks")
    if isinstance(total, int) and total != len(ranks):
        options = [*options, "--ranks", format_ranges(ranks).replace(" ", "")]
    source = manifest["identity"].get("source")
    return join(["rankxform", "verify", str(source or "SRC"), folder, *options])


_SUFFIX = "_strategy.ckpt"


def strategy_path(dst: str) -> Path:
    """Return where a derived strategy is kept: beside the destination folder, under its name.

    Raises UsageError for a folder without a name.
    """
    folder = Path(dst)
    folder = folder.resolve() if folder.name == ".." else folder
    if not folder.name:
        raise UsageError("has no name by which its strategy could be kept beside it", where=dst)
    return folder.with_name(folder.name + _SUFFIX)


def label_beside(dst: str) -> str:
    """Return what the derived strategy of a destination is called, wherever it is kept."""
    return dst.rstrip("/") + _SUFFIX if scheme_of(dst) else str(strategy_path(dst))


def _path(target: Target) -> Path | None:
    """Return where the strategy belongs; None where none was derived and none can be there."""
    if target.dst is None:
        return None
    try:
        path = strategy_path(target.dst)
        path.exists()
    except (OSError, UsageError):  # a name that is too long, or none
        if target.derived is not None:
            raise
        return None
    return path


def check_strategy_file(request: Request, target: Target) -> None:
    """Refuse what lies where the destination's strategy belongs, if it describes another.

    One that rankxform derived is replaced if the user says so; the source's, a compiler's and any
    other file never. Raises StorageError.
    """
    check_companions(request, target)
    path = _path(target)
    if path is None or (not path.exists() and not path.is_symlink()):
        return
    ours = _derived_strategy_at(path)
    if target.derived is None:
        if ours is None or _describes(ours, target):
            return
    elif path.is_file() and _content(target, path) == read_bytes(path):
        return
    source = path_of(request.src_strategy)
    if (
        source is not None
        and source.exists()
        and any(is_same_file(path, f) for f in strategy_files_at(source))
    ):
        raise StorageError(
            "is the source's strategy, and the destination's belongs there",
            "choose another destination",
            where=path,
        )
    if ours is None:
        raise StorageError(
            "is no strategy that rankxform derived, and the destination's belongs there",
            "move it away",
            where=path,
        )
    if not request.overwrite:
        raise StorageError(
            "is the derived strategy of another destination than this one will be",
            "remove it",
            "say --overwrite",
            where=path,
        )


def write_companions_near(target: Target) -> list[str]:
    """Copy a model's small files into the destination; write a derived strategy beside it.

    Returns the names of the files that were copied. A strategy that described an earlier
    destination is removed.
    """
    copied_names = []
    for name, content in target.companions.items():
        path = target.folder / name
        if not path.is_file() or read_bytes(path) != content:
            # Under the destination's lock: what a killed run left is replaced.
            write_atomically(path, content)
            copied_names.append(name)
    _keep_strategy(target)
    return copied_names


def _keep_strategy(target: Target) -> None:
    path = _path(target)
    if path is None:
        return
    if target.derived is not None:
        data = _content(target, path)
        if not path.is_file() or read_bytes(path) != data:
            write_atomically(path, data, shared=True)
    elif path.is_file():
        ours = _derived_strategy_at(path)
        if ours is not None and not _describes(ours, target):
            remove_if_possible(path)


def check_companions(request: Request, target: Target) -> None:
    """Refuse to replace a model's small files by others. Raises StorageError."""
    store = store_at(target.place)
    for name, content in target.companions.items():
        if not request.overwrite and store.has(name) and store.read(name) != content:
            raise StorageError(
                "is already there, and another than would be written",
                "remove it",
                "say --overwrite",
                where=address_of(target.place, name),
            )


def _content(target: Target, path: Path) -> bytes:
    assert target.derived is not None
    return encode_strategy(target.derived.strategy, path)[path]


def _derived_strategy_at(path: Path) -> Strategy | None:
    """Return the strategy at `path` if rankxform derived it and it is a file of its own."""
    try:
        if path.is_symlink() or not path.is_file() or not is_strategy(path):
            return None
        strategy = load_strategy(str(path))
    except RankxformError:
        return None
    return strategy if strategy.derived else None


def _describes(ours: Strategy, target: Target) -> bool:
    """Tell whether a strategy gives every rank of the destination the boxes that it gets.

    The destination's may list more optimizer states, which follow their parameters.
    """
    dst = target.planner.dst
    if (ours.stage_size, len(ours.stages)) != (dst.stage_size, len(dst.stages)):
        return False
    for our_layouts, theirs in zip(ours.stages, dst.stages):
        if any(name not in our_layouts for name in theirs if dst.states.of(name) is None):
            return False
        if any(n not in theirs or not same_boxes(our_layouts[n], theirs[n]) for n in our_layouts):
            return False
    return True
