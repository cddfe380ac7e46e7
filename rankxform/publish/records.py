"""Job, manifest and journal lines as documents.

Keys that a reader does not know are passed over, so that later versions may add some. VERSION
counts up when a key goes or changes its meaning; documents of another version are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.engine.checksum import MODULUS
from rankxform.engine.sinks import ExpectedSlice
from rankxform.errors import FormatError
from rankxform.geometry.box import Shape
from rankxform.layout.layout import MOST_RANKS, Layout
from rankxform.layout.strategy import Strategy
from rankxform.planning.plan import Planner
from rankxform.values import NamedTuple, blake2b, dataclass, decode_json

VERSION = 4
MANIFEST, JOB = "rankxform manifest", "rankxform job"


def format_document(kind: str, content: Mapping[str, Any]) -> bytes:
    """Return a JSON document of `kind`, for people to read too."""
    texts = []
    for key, value in {"kind": kind, "version": VERSION, **content}.items():
        text = _short(value)
        if key == "files":  # one in a line
            lines = (f"  {_short(name)}: {_short(entry)}" for name, entry in value.items())
            text = "{\n" + ",\n".join(lines) + "\n }"
        texts.append(f" {_short(key)}: {text}")
    return ("{\n" + ",\n".join(texts) + "\n}\n").encode()


def _short(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def check_record(kind: str, content: Any) -> dict[str, Any]:
    """Return what a document holds, if it is a record of `kind`. Raises FormatError."""
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise FormatError(f"not a {kind}")
    if content.get("version") != VERSION:
        raise FormatError(
            f"expected version {VERSION}, found {content.get('version')!r}, of another rankxform",
            "use that rankxform to complete or to verify it",
            "choose another folder",
            "say --overwrite once this file is moved away",
        )
    _check(content, {"identity": dict, "seed": int, "files": dict}, "it")
    _check(content["identity"], dict.fromkeys(("options", "source files"), dict), "its identity")
    _check_stated(content)
    form = FORMS.get(str(content.get("form", DEFAULT_FORM)))
    if form is None:
        raise FormatError(f"of a form {content['form']!r}, which is not known here")
    companions = content.get("companions", {})
    if not isinstance(companions, dict) or not all(isinstance(d, str) for d in companions.values()):
        raise FormatError("damaged: its companions are no digests by name")
    stale = content.setdefault("stale", {})
    if not isinstance(stale, dict) or not all(map(_is_stale, stale, stale.values())):
        raise FormatError("damaged: what it calls stale are no files of a checkpoint")
    key_types = {"id": int, "size": int, "modified": int} if kind == MANIFEST else {"id": int}
    for name, file_entry in content["files"].items():
        if not isinstance(file_entry, dict):
            raise FormatError(f"damaged: {name!r} is no file of this folder")
        _check(file_entry, key_types, repr(name))
        if not isinstance(file_entry.get("upload", ""), str):
            raise FormatError(f"damaged: the 'upload' of {name!r} is no text")
        if not form.owns(name, file_entry["id"]):
            raise FormatError(f"damaged: {name!r} is no file of rank {file_entry['id']}'s folder")
    return content


_LISTS = ("command", "verify", "copied", "applied", "accepted", "undeclared", "replaces")
_MAPPINGS = ("beside", "stages", "parts", "step", "later")
_FILES_READ = ("source files", "adapter files")


def _check_stated(content: Mapping[str, Any]) -> None:
    """Raise FormatError where what a document need not state is stated in another type."""
    for key in _LISTS:
        texts = content.get(key, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise FormatError(f"damaged: its {key!r} is no list of texts")
    for key in _MAPPINGS:
        if not isinstance(content.get(key, {}), dict):
            raise FormatError(f"damaged: its {key!r} is no object")
    for key in ("proof", "token"):
        if not isinstance(content.get(key, ""), str):
            raise FormatError(f"damaged: its {key!r} is no text")
    if not isinstance(content.get("part bytes", 1), int | None):
        raise FormatError("damaged: its 'part bytes' are no number")
    identity = content["identity"]
    for key in ("source", "step"):
        if not isinstance(identity.get(key, ""), str | None):
            raise FormatError(f"damaged: the {key!r} of its identity is no text")
    for key in _FILES_READ:
        files = identity.get(key, {})
        entries = [*files.values()] if isinstance(files, dict) else [None]
        if not all(isinstance(entry, dict) for entry in entries):
            raise FormatError(f"damaged: the {key!r} of its identity are no files")


def _is_stale(name: str, file_entry: Any) -> bool:
    """Tell whether a record speaks of a file that some form may have made in a destination."""
    is_file_entry = isinstance(file_entry, dict) and all(
        isinstance(file_entry.get(key), int) for key in ("id", "size", "modified")
    )
    return is_file_entry and any(form.owns(name, file_entry["id"]) for form in FORMS.values())


def _check(members: Mapping[str, Any], keys: Mapping[str, type], title: str) -> None:
    for key, kind in keys.items():
        if not isinstance(members.get(key), kind):
            raise FormatError(f"damaged: {title} lacks {key!r}")


_VERIFY = "verify"


def identity_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, is_begun: bool = False
) -> list[str]:
    """Name in words what differs between two identities.

    The source files of both are compared; those that only one has are of ranks that the other
    did not need. is_begun: the old one's work was not finished. Files with another time are others
    then, whatever samples say: bytes of two states would be mixed.

    >>> identity_differences({"options": {"dst_form": "ranks"}}, {"options": {"dst_form": None}})
    ['--dst-form was ranks and is not given']
    """
    messages = []
    for key, value in new.get("options", {}).items():
        was = old.get("options", {}).get(key)
        is_kept = key == _VERIFY and was and not is_begun  # files that stay keep fingerprints
        before, now = _format_value(was), _format_value(value)
        if before != now and not is_kept:  # an earlier version has no word for what is not given
            messages.append(f"--{key.replace('_', '-')} was {before} and is {now}")
    for side in ("source", "destination"):
        if old.get(f"{side} strategy") != new.get(f"{side} strategy"):
            messages.append(f"the {side} strategy is not the same")
    was, steps = old.get("source files", {}), (old.get("step"), new.get("step"))
    if all(steps) and steps[0] != steps[1]:
        messages.append(f"it holds step {steps[0]}, and the source's is {steps[1]}")
        was = {}
    for rank, file_entry in new.get("source files", {}).items():
        old_entry = was.get(rank, file_entry)
        is_later = is_begun and old_entry.get("modified") != file_entry.get("modified")
        if is_later or not is_same_source(old_entry, file_entry):
            messages.append(_file_difference(rank, old_entry, file_entry))
    if old.get("tensors") != new.get("tensors"):
        messages.append("tensors are named, cast or composed otherwise (the map, config.json)")
    samples = old.get("adapter sample"), new.get("adapter sample")
    key = "adapter sample" if all(samples) else "adapter files"
    if any(old.get(key) != new.get(key) for key in (key, "adapter strategy")):
        messages.append("the adapter was changed or is another")
    return messages


def is_same_source(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Tell whether two records are of one source file, by the samples of the same tensors.

    Another step may have the size and time of this one. Another time means another file, unless
    every tensor was looked at: a training may change few of them.

    >>> was = {"file": "a", "size": 8, "modified": 1, "sampled": "w", "sample": "x", "all": True}
    >>> is_same_source(was, {**was, "modified": 2}), is_same_source(was, {**was, "sample": "y"})
    (True, False)
    """
    if any(was.get(key) != now.get(key) for key in ("file", "size")):
        return False
    comparable = "sample" in was and was.get("sampled") == now.get("sampled")
    if comparable and was["sample"] != now.get("sample"):
        return False
    is_fully_sampled = comparable and was.get("all") and now.get("all")
    return bool(is_fully_sampled) or was.get("modified") == now.get("modified")


def _file_difference(key: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    rank = key.partition(",")[0]
    if was.get("file") != now["file"]:  # of another step, say
        return f"the source file of rank {rank} was {was.get('file')} and is {now['file']}"
    return f"source file {now['file']} of rank {rank} was changed or is another"


def _format_value(value: Any) -> str:
    """Write an option's value, as JSON has it."""
    return "not given" if value in (None, False, []) else "given" if value is True else f"{value}"


class PartFile(NamedTuple):
    """A part file, as a journal knows it again: its inode, and a digest of its layout."""

    inode: int
    layout: str


@dataclass
class CompletedSlices:
    """What journals say is on the device."""

    parts: dict[int, PartFile] = field(default_factory=dict)  # file -> its part file
    # File -> names whose slices are complete.
    names_of_file: dict[int, set[str]] = field(default_factory=dict)
    # File -> sum of their fingerprints, modulo 2**64.
    sums: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # file -> least bytes of its part file
    durable: bool = True  # whether all of it was synced

    def limited_to(self, files: Iterable[int]) -> CompletedSlices:
        """Return what is said of `files`."""
        file_set = set(files)
        return CompletedSlices(
            {file: part for file, part in self.parts.items() if file in file_set},
            {file: names for file, names in self.names_of_file.items() if file in file_set},
            {file: value for file, value in self.sums.items() if file in file_set},
            {file: size for file, size in self.sizes.items() if file in file_set},
            self.durable,
        )

    def add(self, completed_slices: CompletedSlices) -> None:
        """Take what another says too."""
        self.durable &= completed_slices.durable
        self.parts.update(completed_slices.parts)
        for file, names in completed_slices.names_of_file.items():
            self.names_of_file.setdefault(file, set()).update(names)
        for file, value in completed_slices.sums.items():
            self.sums[file] = (self.sums.get(file, 0) + value) % MODULUS
        for file, size in completed_slices.sizes.items():
            self.sizes[file] = max(size, self.sizes.get(file, 0))


def format_start(
    parts: Mapping[int, PartFile], durable: bool, boot: str, replaces: Sequence[str]
) -> bytes:
    """Return the first line of a journal.

    Without `durable` the journal is valid only until the machine is rebooted. It stands for the
    journals that it `replaces`.
    """
    return _line({"parts": parts, "durable": durable, "boot": boot, "replaces": list(replaces)})


def format_moved(
    moved_names: Iterable[tuple[Sequence[int], Sequence[str]]],
    sums: Mapping[int, int],
    sizes: Mapping[int, int],
) -> bytes:
    """Return a line that says which slices have come to be complete: (files, names) of each.

    sizes: bytes of the part files, by file.
    """
    return _line(
        {"done": [[list(r), list(n)] for r, n in moved_names], "sums": sums, "sizes": sizes}
    )


def _line(fields: Mapping[str, Any]) -> bytes:
    """Return a line with a digest of its own."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    return _digest(text) + b" " + text + b"\n"


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=8).hexdigest().encode()


def merge_journals(journals: Mapping[str, bytes], boot: str) -> CompletedSlices:
    """Merge journals, by name.

    A line that was cut off or damaged, and what follows it, is dropped.
    """
    read = {name: _journal(data) for name, data in journals.items()}
    replaced = {old for journal in read.values() if journal for old in journal[1]}
    merged = CompletedSlices()
    for name, journal in read.items():
        if journal and name not in replaced and (journal[2].durable or journal[0] == boot):
            merged.add(journal[2])
    return merged


def _journal(data: bytes) -> tuple[str, list[str], CompletedSlices] | None:
    """Return what one journal says: of which boot, which others it replaces, what is done."""
    journal = None
    for line in data.split(b"\n")[:-1]:
        digest, _, text = line.partition(b" ")
        if digest != _digest(text):
            break
        try:
            fields = decode_json(text)
            if journal is None:
                parts = {int(r): PartFile(int(i), str(d)) for r, (i, d) in fields["parts"].items()}
                first = CompletedSlices(parts, durable=bool(fields["durable"]))
                journal = str(fields["boot"]), list(map(str, fields["replaces"])), first
                continue
            line_slices = CompletedSlices(
                sums={int(file): int(value) for file, value in fields["sums"].items()},
                sizes={int(file): int(size) for file, size in fields["sizes"].items()},
            )
            for files, names in fields["done"]:
                for file in files:
                    line_slices.names_of_file.setdefault(int(file), set()).update(map(str, names))
        except (*_WRONG, FormatError):
            break
        journal[2].add(line_slices)
    return journal


@dataclass(frozen=True)
class FolderState:
    """What was found in a target when it was opened; every process gets it."""

    folder: Path
    token: str
    seed: int  # of fingerprints
    complete_files: frozenset[int]  # ranks whose files are complete
    completed: CompletedSlices  # of those that are not
    resumed: bool = False  # whether a stopped run is continued, whatever it left

    def with_all(self, states: Iterable[FolderState]) -> FolderState:
        """Return this folder's state with what is complete in all folders, of which it is one."""
        complete_files, completed, resumed = self.complete_files, CompletedSlices(), False
        for state in states:
            complete_files |= state.complete_files
            completed.add(state.completed)
            resumed = resumed or state.resumed
        return replace(self, complete_files=complete_files, completed=completed, resumed=resumed)


_WRONG = (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What a document of another structure leads to."""


def manifest_contents(planner: Planner, files: tuple[int, ...]) -> dict[str, Any]:
    """Return, for JSON, what the files of each pipeline stage hold.

    A parameter is the number of its kind: type, full shape, and the number of its layout. Of files
    that hold some of a rank's parameters, the rank and the names are kept too. What no strategy
    listed stays unlisted, so that the way back is the identity.
    """
    dst = planner.dst
    stages: dict[str, Any] = {}
    for rank in dict.fromkeys(planner.content_of_file(file).rank for file in files):
        stage = str(dst.stage_of(rank))
        if stage in stages:
            continue
        layouts: dict[Layout, int] = {}
        kinds: dict[tuple[str, Shape, int], int] = {}
        parameters: dict[str, int] = {}
        for name, layout in planner.layouts_of_rank(rank).items():
            p = planner.parameter(name)
            kind = p.dtype, p.shape, layouts.setdefault(layout, len(layouts))
            parameters[p.name] = kinds.setdefault(kind, len(kinds))
        written = [asdict(layout) for layout in layouts]
        stages[stage] = {"layouts": written, "kinds": list(kinds), "parameters": parameters}
    parts = {
        str(file): [planner.content_of_file(file).rank, list(planner.layouts_of_file(file))]
        for file in files
        if planner.content_of_file(file).names is not None
    }
    document: dict[str, Any] = {"stage size": dst.stage_size, "stage count": len(dst.stages)}
    document["stages"] = stages
    if parts:
        document["parts"] = parts
    names = {name for stage in stages.values() for name in stage["parameters"]}
    undeclared = sorted(names.intersection(planner.selection.replicated))
    if undeclared and len(undeclared) < len(names):
        document["undeclared"] = undeclared
    return document


def expected_slices(
    manifest: Mapping[str, Any], file: int
) -> dict[str, tuple[tuple[int, ...], ExpectedSlice]] | None:
    """Return what a file holds, from a manifest: full shape, type and box by name.

    None where it does not say. Raises FormatError.
    """
    if "stages" not in manifest:
        return None
    try:
        size = manifest["stage size"]
        rank, names = manifest.get("parts", {}).get(str(file), (file, None))
        stage = manifest["stages"].get(str(rank // size))
        if stage is None:
            return None
        kinds_by_name, slices_by_name = _stated_sharding(stage), {}
        for name in kinds_by_name if names is None else names:
            dtype, shape, layout = kinds_by_name[name]
            box = layout.grid(shape).box(layout.cell(rank % size))
            slices_by_name[name] = shape, ExpectedSlice(dtype, box)
        return slices_by_name
    except _WRONG as error:
        raise FormatError(f"what it says of file {file} makes no sense ({error!r})") from error


@dataclass(frozen=True)
class ManifestSharding:
    """What a manifest states of a whole checkpoint: the strategy, and types by name.

    strategy: None where not all pipeline stages were made.
    """

    strategy: Strategy | None
    dtypes: Mapping[str, str]


def manifest_sharding(manifest: Mapping[str, Any], label: str) -> ManifestSharding:
    """Return how the ranks that a manifest speaks of shard. Raises FormatError."""
    try:
        size, count = int(manifest["stage size"]), int(manifest["stage count"])
        if not (0 < size <= MOST_RANKS and 0 < count <= MOST_RANKS):
            raise ValueError(f"{count} stages of {size} ranks")
        stages = [
            _stated_sharding(manifest["stages"].get(str(number), _NOTHING))
            for number in range(count)
        ]
        shapes = {n: shape for stage in stages for n, (_, shape, _) in stage.items()}
        dtypes = {n: dtype for stage in stages for n, (dtype, _, _) in stage.items()}
        undeclared = {*map(str, manifest.get("undeclared", ()))}
        layouts = tuple(
            {n: layout for n, (_, _, layout) in s.items() if n not in undeclared} for s in stages
        )
        shapes = {n: shape for n, shape in shapes.items() if n not in undeclared}
        strategy = Strategy(layouts, size, label, shapes=shapes) if all(stages) else None
        return ManifestSharding(strategy, dtypes)
    except _WRONG as error:
        raise FormatError(f"what it says of its files makes no sense ({error!r})") from error


_NOTHING: Mapping[str, Any] = {"layouts": (), "kinds": (), "parameters": {}}


def _stated_sharding(stage: Mapping[str, Any]) -> dict[str, tuple[str, Shape, Layout]]:
    layouts = [_layout(fields) for fields in stage["layouts"]]
    kinds = [(str(dtype), tuple(map(int, shape)), layouts[n]) for dtype, shape, n in stage["kinds"]]
    return {name: kinds[number] for name, number in stage["parameters"].items()}


def _layout(fields: Mapping[str, Any]) -> Layout:
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    plain["tensor_map"] = tuple(map(tuple, fields["tensor_map"]))
    for key, value in plain.items():
        numbers: Iterable[Any] = value if isinstance(value, tuple) else (value,)
        if key == "tensor_map":
            numbers = chain.from_iterable(numbers)
        if not all(isinstance(number, int | None) for number in numbers):
            raise TypeError(f"{key} is {fields[key]!r}")
    return Layout(**plain)
