"""What is looked at before the first byte is written: the target, and whether ranks agree."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rankxform.checkpoints.rank_folders import SUFFIXES
from rankxform.errors import StorageError, UsageError
from rankxform.planning.consistency import (
    check_each_differs,
    check_extra_rank,
    check_slices_differ,
    check_unlisted,
    cut_by_hand,
    extra_probes,
    probes,
    to_compare,
)
from rankxform.storage import samples
from rankxform.storage.posix import Tick, inode, is_inside, is_same, lies_in
from rankxform.transport import Team

from .prepare import Conversion


def check_target(conversion: Conversion, team: Team) -> None:
    """See that writing will harm nothing, on every node. Raises UsageError or StorageError."""
    with team.together():
        request = conversion.request
        if request.dst is None:
            raise UsageError("no destination folder")
        if request.shapes is not None:
            raise UsageError("shapes are for a plan; a transform reads a checkpoint")
    speaks = team.nodes.speaks(team.rank)
    with team.together():
        if speaks:
            _check_apart(conversion, Path(request.dst))


def _check_apart(conversion: Conversion, dst: Path) -> None:
    """Refuse destination files that are, or lie among, source files, whatever their paths."""
    src, sources = Path(conversion.request.src), conversion.shards.paths.values()
    files = {inode(path): path for path in sources}
    folders = {inode(path.parent) for path in sources}
    inside = src.is_dir() and (is_inside(dst, src) or lies_in(dst, folders))
    for rank in conversion.ranks:
        final = conversion.final(rank)
        there, folder = inode(final), inode(final.parent)
        if inside or (folder is not None and folder in folders):
            raise UsageError(
                f"{final}: lies in the source folder {src}, which is never written to; "
                "choose another destination"
            )
        if there is not None and there in files:
            raise UsageError(
                f"{final}: is the source file {files[there]} under another name, which is never "
                "replaced; choose another destination"
            )
        if final.is_dir():
            raise StorageError(f"{final}: is a folder, where a checkpoint file is to be written")
    if any(is_same(path.parent.parent, dst) for path in sources):
        raise UsageError(
            f"{dst}: holds the source in its rank folders, which are never written to; choose "
            "another destination"
        )


def foreign_files(own: Iterable[Path], team: Team) -> list[str]:
    """Warn of other checkpoint files in the folders of destination files. Collective.

    MindSpore and MindFormers choose among the files of a rank folder by name or time.
    """
    mine = {path: path.parent for path in own}

    def beside() -> list[str]:
        if not team.nodes.speaks(team.rank):
            return []
        return [
            str(path)
            for folder in dict.fromkeys(mine.values())
            if re.fullmatch(r"rank_\d+", folder.name)
            for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
            if path.suffix in SUFFIXES and path not in mine
        ]

    found = sorted({path for some in team.gather(beside) for path in some})
    if not found:
        return []
    more = f" and {len(found) - 1} more" if found[1:] else ""
    return [
        f"{found[0]}{more}: another checkpoint file lies in a rank folder of this destination, and "
        "may be loaded instead; remove what does not belong there"
    ]


@dataclass(frozen=True)
class _Looks:
    """What one process read of its share of the source files, before the conversion.

    digests: of unlisted parameters, complete; samples: of others, (digest, all bytes equal). By
    rank and name.
    """

    nbytes: int
    digests: dict[int, dict[str, bytes]]
    samples: dict[int, dict[str, samples.Sample]]


def compare_ranks(conversion: Conversion, team: Team) -> tuple[int, list[str]]:
    """Read what tells whether the folder fits its strategy; return the bytes read, and notices."""
    request, source = conversion.request, conversion.source
    looks = team.gather_work(lambda tick: _look(conversion, team, tick))
    with team.together():
        sampled = {rank: found for look in looks for rank, found in look.samples.items()}
        by_hand = cut_by_hand(conversion.selection, source)
        if by_hand and not request.allow_equal_slices:
            check_each_differs(source, sampled, by_hand)
        elif not request.allow_equal_slices:
            check_slices_differ(source, sampled, probes(conversion.selection))
        for rank in () if request.allow_extra_ranks else conversion.extra:
            check_extra_rank(source, sampled, rank, str(conversion.shards.paths[rank]))
        digests = {rank: found for look in looks for rank, found in look.digests.items()}
        notices = check_unlisted(source, digests, request.unlisted == "take-one")
    return sum(look.nbytes for look in looks), notices


def _look(conversion: Conversion, team: Team, tick: Tick) -> _Looks:
    every = {**conversion.indexes, **conversion.extra}
    unlisted = to_compare(conversion.selection, conversion.source)
    extra = extra_probes(conversion.source, conversion.extra)
    by_hand = cut_by_hand(conversion.selection, conversion.source)
    sampled = [*dict.fromkeys([*probes(conversion.selection), *extra, *by_hand])]
    found = _Looks(0, {}, {})
    nbytes = 0
    for rank in conversion.sight.dealt(every)[team.rank]:
        path, index = conversion.shards.paths[rank], every[rank]
        if conversion.request.check_crc:
            samples.check_crc(path, index, tick)
        if unlisted and rank in conversion.indexes:
            found.digests[rank] = samples.digest_all(path, index, unlisted, tick)
            nbytes += sum(index.nbytes(name) for name in found.digests[rank])
        if sampled:
            found.samples[rank] = samples.sample(path, index, sampled)
        tick(0)
    return replace(found, nbytes=nbytes)
