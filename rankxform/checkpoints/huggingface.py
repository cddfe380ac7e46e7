"""Hugging Face folders: whole tensors in shards by size, and an index; or in one file.

::

    model-00001-of-00003.safetensors ...   whole tensors, in the order of names
    model.safetensors.index.json           {"metadata": {"total_size": N}, "weight_map": {...}}
    model.safetensors                      instead of both, if one file is enough

Any other folder of safetensors files of whole tensors is read alike, if no name occurs twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rankxform.checkpoints import folders
from rankxform.errors import RankxformError
from rankxform.planning.plan import FileContent, Planner
from rankxform.statements import COMMIT, Statement
from rankxform.storage.store import FOLDER, Listing, Store
from rankxform.values import pattern_on_use

from .base import CheckpointRef, DestinationFiles, Form, RankFilter, SelectedFiles
from .dcp import SHARD, holds_boxes
from .folders import DCP_METADATA

INDEX = "model.safetensors.index.json"
DEFAULT_BYTES = 5 * 10**9
_DOWNLOADED = ".cache/huggingface/download/{name}.metadata"
_SHARD = pattern_on_use(
    r"(?P<prefix>[^/\0]*?)model(-(?P<number>[0-9]{5,9})-of-(?P<of>[0-9]{5,9}))?\.safetensors"
)


class HuggingFaceForm(Form):
    """A Hugging Face folder (`checkpoints.base.Form`)."""

    name = "huggingface"
    title = "Hugging Face"
    options = ("max_shard", "prefix")
    container = "safetensors"
    configured = True
    is_written = True

    def pattern(self, where: CheckpointRef) -> str:
        return "*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        """By its index or its shards; else by safetensors files, if nothing else is there."""
        names = listing.entries
        has_boxes = any(  # of tensors, of which a table or the files themselves tell
            name == DCP_METADATA or SHARD.fullmatch(name) or _OF_RANK().match(name)
            for name in names
        )
        is_mapped = _MAP_OF_NAMES in names and not any(name.endswith(INDEX) for name in names)
        is_other = listing.name.startswith("rank_") or is_mapped
        if listing.kind != FOLDER or is_other or has_boxes:
            return None
        for name in names:
            if name.endswith(INDEX) or _SHARD().fullmatch(name):
                return None if holds_boxes(listing, store) else name
        if any(not name.startswith(".") for name in listing.folders):
            return None
        if holds_boxes(listing, store):
            return None
        if any(
            name.endswith(".ckpt") or name in _OTHERS or _OTHER().search(name) for name in names
        ):
            return None
        return next((name for name in names if name.endswith(folders.SUFFIX)), None)

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        folders.check_no_step(self.name, where)
        index = folders.single_index(listing, INDEX)
        if index is None:
            _check_clear(listing, indexed=False)
        selected = folders.whole_tensors(listing, store, index)
        assert selected.description is not None
        listed_files = {*selected.names.values(), *selected.description.passed_over}
        if index is not None and not {*folders.tensor_files(listing.files)} <= listed_files:
            _check_clear(listing, indexed=True)
        statements = (*selected.description.statements, *_commits(selected, store))
        return replace(selected, description=replace(selected.description, statements=statements))

    def destination_files(
        self, planner: Planner, options: Mapping[str, Any], step: int | None, suffix: str
    ) -> DestinationFiles:
        """In the order of names, by bytes, as huggingface_hub divides them."""
        folders.refuse_sharded_strategy(self.name, planner.dst.ranks)
        max_bytes = options["max_shard"] or DEFAULT_BYTES
        shards = folders.split_by_bytes(planner.tensors(0), max_bytes)
        prefix, count = options["prefix"] or "", len(shards)
        names = {n: f"{prefix}model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)}
        if count == 1:
            names = {0: f"{prefix}model.safetensors"}
        return DestinationFiles(
            names, {n: FileContent(0, frozenset(shard)) for n, shard in enumerate(shards)}
        )

    def metadata(self, source: Mapping[str, str]) -> Mapping[str, str]:
        return folders.plain_metadata(source, "pt")

    def owns(self, name: str, file: int) -> bool:
        match = _SHARD().fullmatch(name)
        return match is not None and int(match["number"] or 1) == file + 1

    def companion_names(self, names: Collection[str]) -> tuple[str, ...]:
        """The index belongs to one file too: left from several, it would be believed."""
        prefixes = {match["prefix"] for name in names if (match := _SHARD().fullmatch(name))}
        return tuple(prefix + INDEX for prefix in sorted(prefixes))

    def companions(
        self, planner: Planner, arrangement: DestinationFiles, training: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        if len(arrangement.names) == 1:
            return {}
        files = {name: planner.tensors(file) for file, name in arrangement.names.items()}
        (name,) = self.companion_names(list(files))
        content = folders.index_document(files, indent=2, sort_keys=True)
        return {name: [content, b"\n"]}

    def foreign_files(self, listing: Listing, dst_names: Collection[str]) -> list[str]:
        """Return other tensor files, and indexes of others."""
        own_indexes = self.companion_names(dst_names)
        indexes = [n for n in listing.entries if n.endswith(INDEX) and n not in own_indexes]
        return [*folders.foreign_files(listing, dst_names), *indexes]


def _commits(selected: SelectedFiles, store: Store) -> Iterator[Statement]:
    """Yield the commit that each file was downloaded of, as huggingface_hub notes it."""
    for name in selected.names.values():
        metadata_name = _DOWNLOADED.format(name=name)
        with suppress(RankxformError):  # a note of somebody else's, which cannot be read
            if name and store.has(metadata_name):
                commit = (
                    store.read(metadata_name).partition(b"\n")[0].decode(errors="replace").strip()
                )
                yield Statement(COMMIT, "", commit, name)


def _check_clear(listing: Listing, indexed: bool) -> None:
    """Refuse files of which it is not clear which are the model."""
    files = folders.tensor_files(listing.files)
    matches = {name: match for name in files if (match := _SHARD().fullmatch(name))}
    alone = [name for name, match in matches.items() if match["number"] is None]
    other_files = [name for name in files if name not in alone]
    folders.check_alone(listing, alone, ["an index"] if indexed else [*other_files, *alone[1:]])
    if not indexed:
        folders.check_shards(listing, matches.values())


_OF_RANK = pattern_on_use(
    r"_rank[0-9]+_|[0-9]+\.metadata$|\.rank[0-9]+_metadata$|model-(?:rank|pp)-[0-9]+-"
)
_MAP_OF_NAMES = "param_name_map.json"
"""Of unified safetensors, whatever their files are called."""
_OTHERS = (_MAP_OF_NAMES, "part0.safetensors", "metadata.json", "common.json")
_OTHER = pattern_on_use(r"(^|-)(model|opt)-\d{7}-\d{7}\.safetensors$")
"""Files by which a folder of safetensors is of another form."""
