"""Files that a user names: strategies, mapping tables, configurations."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.errors import (
    FormatError,
    RankxformError,
    RequestError,
    StorageError,
    StrategyError,
    UsageError,
    did_you_mean,
)
from rankxform.formats import strategy_files
from rankxform.formats.strategy_files import (
    encode_proto_stage,
    merge_proto_stages,
    parse_strategy_proto,
)
from rankxform.geometry.box import Shape
from rankxform.layout.layout import Layout
from rankxform.layout.names import natural_sort_key
from rankxform.layout.strategy import (
    DERIVED,
    SHARD_PREFIX,
    PatternStrategy,
    Strategy,
    StrategyRecord,
    WholeStrategy,
    merge_records,
)
from rankxform.statements import quote
from rankxform.values import decode_json

from .identity import is_same_file
from .posix import (
    open_for_reading,
    range_reader,
    read_bytes,
    suggest_similar_path,
    write_atomically,
)
from .store import FILE, NOTHING, Store, is_litter, is_path, store_at

if TYPE_CHECKING:
    from rankxform.formats.map_table import MapTable


SUFFIXES = (".ckpt", ".json")


def load_strategy(where: str | Strategy | None) -> Strategy:
    """Read the strategy that `where` names, a file, a folder of them, or none; or return it.

    ``shard:REGEX=AXIS@RANKS`` is a strategy by patterns (`PatternStrategy`). The metadata.json of a
    Checkpoint 2.0 is a strategy too.
    ``None``, ``""``, ``"none"`` and ``"None"`` stand for whole tensors (a file of that name is
    ``./none``); ``None`` says that no strategy was given, which a checkpoint of several ranks does
    not accept (`rankxform.source.choose`). Raises StrategyError that names the file.
    """
    if isinstance(where, Strategy):
        return where
    if where is None or is_none(where):
        return WholeStrategy()
    if where.startswith(SHARD_PREFIX):
        return PatternStrategy.parse(where)
    with documents_at(where) as place:
        metadata_path = metadata_at(place)
        if metadata_path is not None:
            from .checkpoint2_metadata import read_checkpoint2_metadata

            return read_checkpoint2_metadata(metadata_path).strategy
        paths = strategy_files_at(place)
        return merge_records([read_strategy_file(path) for path in paths], where)


@contextmanager
def documents_at(where: str) -> Iterator[Path]:
    """Yield a path with the small documents that an address names: itself, or copies of them."""
    if (path := path_of(where)) is not None:
        yield path
        return
    from tempfile import TemporaryDirectory

    store = store_at(where)
    listing = store.list("*")
    if listing.kind == NOTHING:
        raise UsageError("no such file or folder", where=where)
    with TemporaryDirectory(prefix="rankxform-") as folder:
        place = Path(folder) / listing.name
        if listing.kind == FILE:
            place.write_bytes(store.read(""))
        else:
            place.mkdir()
            for name in listing.files:
                (place / name).write_bytes(store.read(name))
        yield place


def metadata_at(where: Path) -> Path | None:
    """Return the metadata.json of a Checkpoint 2.0 that `where` is, or that lies in it."""
    for path in (where, where / "metadata.json"):
        if path.suffix == ".json" and path.is_file():
            from .checkpoint2_metadata import is_metadata

            if is_metadata(path):
                return path
    return None


def is_none(where: str | Strategy | None) -> bool:
    """Tell whether `where` stands for whole tensors on one rank."""
    return where in (None, "", "none", "None") or isinstance(where, WholeStrategy)


def path_of(where: str | Strategy | None) -> Path | None:
    """Return the file or folder that `where` names; None for whole tensors, patterns, addresses and
    values."""
    if not isinstance(where, str) or is_none(where) or where.startswith(SHARD_PREFIX):
        return None
    return Path(where) if is_path(where) else None


def strategies_near(folder: Path, ranks: int) -> list[tuple[Path, Strategy]]:
    """Return strategies for at least so many ranks that lie in a checkpoint's folder or beside it.

    What counts is what has "strategy" in its name, as in MindFormers' ``output/strategy`` beside
    ``output/checkpoint``. Those for just so many ranks come first. What cannot be read is left out.
    """
    candidates = []
    for where in (folder.parent, folder):
        entries: list[Path] = []
        with suppress(OSError):
            entries = [
                path
                for path in sorted(where.iterdir())
                if "strategy" in path.name.lower() and not is_litter(path.name)
            ]
        candidates += load_readable(entries)
    fitting = [(path, strategy) for path, strategy in candidates if strategy.ranks >= ranks]
    return sorted(fitting, key=lambda pair: pair[1].ranks != ranks)


def load_readable(paths: Iterable[Path]) -> list[tuple[Path, Strategy]]:
    """Return the paths that hold a strategy, each with it.

    What cannot be read, and what is much larger than strategies are, is left out.
    """
    loaded = []
    for path in paths:
        with suppress(RankxformError, OSError):
            parts = (
                strategy_candidates(path)
                if path.is_dir()
                else [path]
                if path.suffix in SUFFIXES
                else []
            )
            if parts and sum(part.stat().st_size for part in parts) <= _LOOKED_AT:
                loaded.append((path, load_strategy(str(path))))
    return loaded


def strategy_files_at(path: Path) -> list[Path]:
    """Return the strategy files at `path`, ordered as a person would number them."""
    if not path.exists():
        tries = suggest_similar_path(path, _holds_strategy)
        if re.fullmatch(r".+=-?\d+@\d+", path.name):
            tries = [f"shard:{path.name}, which is a strategy of expressions"]
        raise UsageError("no such strategy file or folder", *tries, where=path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError("is neither a file nor a folder", where=path)
    paths = strategy_candidates(path)
    if not paths:
        inside = [f for f, _ in load_readable(p for p in sorted(path.iterdir()) if p.is_dir())]
        named = f"; did you mean {inside[0]}?" if inside else ""
        raise StrategyError(f"holds no strategy file (*.ckpt or *.json){named}", where=path)
    return paths


def _holds_strategy(path: Path) -> bool:
    with suppress(StorageError):
        return bool(strategy_candidates(path)) if path.is_dir() else is_strategy(path)
    return False


def strategy_candidates(path: Path) -> list[Path]:
    """Return what may be strategy files in a folder, in their order."""
    paths = [
        p for p in path.iterdir() if p.suffix in SUFFIXES and not is_litter(p.name) and p.is_file()
    ]
    return sorted(paths, key=lambda path: natural_sort_key(path.name))


def read_strategy_file(path: Path) -> StrategyRecord:
    """Read one strategy file: JSON if its name ends in ``.json``, else protobuf."""
    as_json = path.name.endswith(".json")
    parse = strategy_files.parse_strategy_json if as_json else parse_strategy_proto
    if not as_json and (first := first_byte(path)) not in _FIRST_BYTES:
        kind = "a checkpoint file, not a strategy file" if first == b"\n" else "no strategy file"
        option = f"--src-config {quote(str(path))}"
        configs = f"{option}, or --dst-config, for what a job's YAML file says"
        tries = (configs,) if path.suffix in (".yaml", ".yml") else ()
        raise StrategyError(f"is {kind}", *tries, where=path)
    try:
        return parse(read_bytes(path), str(path))
    except (FormatError, StrategyError) as error:
        raise StrategyError.of_parts(error.at(path)) from error


_LOOKED_AT = 256 << 20
"""Most bytes of what is looked at without being asked for."""

_JSON_BYTES = 1 << 20
"""Within so many bytes of its start or end a strategy in JSON says what it is."""

_FIRST_BYTES = (b"", b"\x08", b"\x12", b"\x1a")
"""How a strategy may start: its stage, an operator, a layout. A checkpoint starts with b"\\n"."""


def first_byte(path: Path) -> bytes:
    """Return the first byte of a file, none of an empty one."""
    with open_for_reading(path) as (fd, _):
        return range_reader(fd, path)(0, 1)


def is_strategy(path: Path) -> bool:
    """Tell a strategy file from a checkpoint by its name and first byte, and from other JSON."""
    if path.suffix == ".json":
        if metadata_at(path) is not None:
            return True
        with open_for_reading(path) as (fd, status):
            read_at = range_reader(fd, path)
            ends = 0, max(0, status.st_size - _JSON_BYTES)
            return any(strategy_files.is_strategy(read_at(start, _JSON_BYTES)) for start in ends)
    return path.suffix != ".safetensors" and first_byte(path) in _FIRST_BYTES[1:]


def output_path(where: str) -> Path:
    """Return the path of a strategy or a page that is to be written. Raises UsageError for an
    address: what `Path` makes of one is a folder here."""
    if not is_path(where):
        name = where.rstrip("/").rpartition("/")[2] or "FILE"
        text = "expected a path to write to, found an address"
        raise UsageError(text, f"{name}, and copy it there", where=where)
    return Path(where)


def merge_stage_files(stages: str, merged: str, *, overwrite: bool = False) -> Strategy:
    """Write the stage files in a folder as one merged file that MindSpore reads.

    The format is the inputs'; the content is what merge_pipeline_strategys writes. Returns the
    merged strategy. Raises StrategyError where stages are missing or contradict each other, and
    StorageError where `merged` is there and may not be replaced.
    """
    target = output_path(merged)
    if target.exists() and not overwrite:
        raise StorageError("is already there", "remove it", "say --overwrite", where=target)
    if target.exists() and not is_strategy(target):
        raise StorageError("is there, and is no strategy", "name another file", where=target)
    with documents_at(stages) as folder:
        if not folder.is_dir():
            raise UsageError("not a folder of strategy files", where=stages)
        strategy, data = merge_in_memory(folder, target)
    write_atomically(target, data, shared=True)
    return strategy


def merge_in_memory(folder: Path, target: Path) -> tuple[Strategy, bytes]:
    """Return the merged strategy of the stage files in `folder`, and the content of `target`."""
    paths = [path for path in strategy_files_at(folder) if not is_same_file(path, target)]
    if not paths:
        raise UsageError("holds no stage files beside that one", "name another file", where=target)
    records = {path: read_strategy_file(path) for path in paths}
    strategy = merge_records(list(records.values()), str(folder))
    parts = {path: record for path, record in records.items() if not record.merged}
    as_json = target.name.endswith(".json")
    chosen: dict[int, Path] = {}
    for path, record in parts.items():
        if record.json == as_json:
            chosen.setdefault(record.stage, path)
    missing = sorted(set(range(len(strategy.stages))) - set(chosen))
    if missing:
        kind = "JSON" if as_json else "protobuf"
        raise UsageError(
            f"no {kind} file of pipeline stage {missing[0]} to merge",
            "name the merged file .json for JSON stages, .ckpt for protobuf",
            where=folder,
            details="MindSpore takes the format from the name",
        )
    join = strategy_files.merge_json_stages if as_json else merge_proto_stages
    return strategy, join([(stage, read_bytes(chosen[stage])) for stage in sorted(chosen)])


_CONVERTED = "rankxform-converted"
"""The operator in a file that was written anew: a layout tells nothing of a network's operators."""


def encode_strategy(strategy: Strategy, target: Path) -> dict[Path, bytes]:
    """Return the files that hold a strategy: one file, JSON if it ends in ``.json``, or a folder.

    A target without a suffix is a folder with one protobuf file for each stage, as a training
    leaves them. Several stages in one file are merged, as
    MindSpore merges them. Raises StrategyError for what the form cannot hold.
    """
    operator = DERIVED if strategy.derived else _CONVERTED
    check_folded(strategy)
    as_json = target.suffix == ".json"
    encode = strategy_files.encode_json_stage if as_json else encode_proto_stage
    join = strategy_files.merge_json_stages if as_json else merge_proto_stages
    parts = [(n, encode(n, layouts, operator)) for n, layouts in enumerate(strategy.stages)]
    if target.suffix not in SUFFIXES:
        size = strategy.stage_size
        return {target / f"ckpt_strategy_rank_{n * size}.ckpt": data for n, data in parts}
    return {target: parts[0][1] if len(parts) == 1 else join(parts)}


def save_strategy(strategy: Strategy, target: Path) -> list[Path]:
    """Write a strategy to a file or folder that does not exist yet; return the files.

    Raises StorageError where something is there.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise StorageError("is already there", "remove it", "choose another name", where=target)
    if target.is_dir() and target.suffix in SUFFIXES:
        raise StorageError(
            "is a folder", "name a file in it, or a folder without suffix", where=target
        )
    files = encode_strategy(strategy, target)
    for path, data in files.items():
        write_atomically(path, data, shared=True)
    return list(files)


def fold_nested_maps(strategy: Strategy, shapes: Mapping[str, Shape]) -> Strategy:
    """Return a strategy whose nested tensor maps are as protobuf has them, not as JSON does.

    `shapes` are full shapes. A layout stays as it is where it may be nested and no shape is known.
    """

    def fold(name: str, layout: Layout) -> Layout:
        if layout.expanded_shape is None or not layout.may_be_nested:
            return replace(layout, expanded_shape=None)
        shape = shapes.get(name, shapes.get(strategy.states.base_name(name)))
        if shape is None:
            return layout
        try:
            return replace(layout.fold(shape, slices=False), expanded_shape=None)
        except RequestError as error:
            raise StrategyError(f"{name!r}: {error}", where=strategy.label) from error

    stages = tuple(
        {name: fold(name, layout) for name, layout in layouts.items()}
        for layouts in strategy.stages
    )
    return replace(strategy, stages=stages)


def check_folded(strategy: Strategy) -> None:
    """Raise StrategyError for a tensor map that JSON may have expanded, where no shape tells."""
    for layouts in strategy.stages:
        for name, layout in layouts.items():
            if layout.expanded_shape is not None:
                raise StrategyError(
                    f"{name!r} may have a nested tensor map, which JSON lists expanded",
                    "give its shapes (--shapes), or the protobuf file",
                    where=strategy.label,
                )


def rewrite_strategy(source: str, target: Path, shapes: Mapping[str, Shape]) -> list[Path]:
    """Write the strategy at `source` in another form; return the files.

    Stage files of one kind are merged as MindSpore merges them, operators included.
    """
    strategy = load_strategy(source)
    if is_none(source) or source.startswith(SHARD_PREFIX):
        raise UsageError("expected a strategy file or folder", where=f"{source!r}")
    if target.exists():
        return save_strategy(strategy, target)  # refuses, or fills an empty folder
    with documents_at(source) as where:
        kinds = {read_strategy_file(path).json for path in strategy_files_at(where)}
        as_json = target.suffix == ".json"
        if where.is_dir() and len(strategy.stages) > 1 and kinds == {as_json} and target.suffix:
            merge_stage_files(str(where), str(target))
            return [target]
    return save_strategy(fold_nested_maps(strategy, shapes), target)


FOLDER = Path(__file__).resolve().parent.parent / "maps"
CONFIG = "config.json"
META_SIZES = "params.json"  # the same of Meta's own files
_MOST_BASES = 8
"""Tables that extend each other in a row."""


def map_names(naming: Collection[str] = ()) -> list[str]:
    """Return the names of the tables that come with rankxform.

    naming: architectures, or types of models; only tables with one of these, which are not parsed.
    """
    paths = [path for path in FOLDER.glob("*.toml") if not path.name.startswith("_")]
    if naming:
        words = "|".join(re.escape(f'"{word}"') for word in naming)
        quoted = words.encode(errors="surrogatepass")
        paths = [path for path in paths if re.search(quoted, path.read_bytes())]
    return sorted(path.stem for path in paths)


def load_map_table(name: str) -> MapTable:
    """Return the table of that name, or of a file whose name ends in ``.toml``.

    Raises UsageError.
    """
    if name.endswith(".toml"):
        with documents_at(name) as path:
            if not path.is_file():
                raise UsageError("no such mapping table", where=name)
            return _load(path, name, ())
    if name not in map_names():
        raise UsageError(
            f"there is no map {name!r}{did_you_mean(name, map_names())}",
            details=f"there are {', '.join(map_names())}, and your own tables (*.toml)",
        )
    return _load(FOLDER / f"{name}.toml", f"map {name}", ())


def _load(path: Path, label: str, above: tuple[str, ...]) -> MapTable:
    from rankxform.formats.map_table import parse_extends, parse_map_table

    data = read_bytes(path)
    bases = []
    for name in dict.fromkeys(parse_extends(data, label)):
        base = path.parent / f"{name}.toml"
        base = base if base.is_file() else FOLDER / f"{name}.toml"
        here = (*above, str(path.resolve()))
        if not base.is_file() or str(base.resolve()) in here or len(here) > _MOST_BASES:
            raise UsageError(f"extends {name!r}, which is no table beside it", where=label)
        bases.append(_load(base, label, here))
    return parse_map_table(data, label, tuple(bases))


_COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "spiece.model",
    "sentencepiece*", "*.tiktoken", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "LICENSE*",
)  # fmt: skip
"""Files of a Hugging Face folder that belong to a model beside its tensors."""


def companions(place: str) -> dict[str, bytes]:
    """Return the small files that belong to a published model, by name. Raises UsageError."""
    store = store_at(place)
    contents = {name: store.read(name) for name in companion_names(store)}
    if CONFIG not in contents:
        raise UsageError(f"has no {CONFIG}", "give --like a published model", where=place)
    return contents


def companion_names(store: Store) -> list[str]:
    """Return the names of a model's small files in a folder."""
    entries = store.list("*").entries
    named = (name for name in entries if any(fnmatchcase(name, p) for p in _COMPANIONS))
    return sorted(name for name in named if store.has(name))


def read_config_bytes(place: str | Path) -> bytes:
    """Return a model's configuration as it is: a file, or that of a folder. Raises UsageError."""
    store = store_at(str(place))
    name = "" if store.has("") else CONFIG
    if not store.has(name):
        raise UsageError("no such configuration", where=place)
    return store.read(name)


def read_config(place: str | Path) -> dict[str, Any]:
    """Return a model's configuration. Raises UsageError."""
    return parse_config(read_config_bytes(place), str(place))


def parse_config(data: bytes, path: str) -> dict[str, Any]:
    """Return a model's configuration, which `path` holds. Raises UsageError."""
    try:
        document = decode_json(data, any_texts=True)
    except FormatError as error:
        raise UsageError(error.what, where=path) from None
    if not isinstance(document, dict):
        raise UsageError("expected an object, as in a model's config.json", where=path)
    return document
