"""A kind of destination that is no folder: files are uploaded in parts, from first byte to last.

A part, once sent, is never changed, and none can be sent before those before it. An upload whose
parts are all there is completed, and only then can its file be read.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rankxform.engine.pipeline import execute
from rankxform.errors import StorageError
from rankxform.formats.container import spans_of_range
from rankxform.planning.assign import remaining
from rankxform.target.destination import Destination, FileLayoutCache, StoredFiles
from rankxform.target.manifest import conversion_identity


@dataclass
class Server:
    """Keeps what is uploaded below a folder, so that it outlives the process that sent it.

    before_part: called before a part is taken, by which it may be refused.
    """

    root: Path
    part_size: int
    before_part: object = field(default=lambda: None)

    def parts(self, name):
        """Return how many parts of an upload are there, and their bytes."""
        found = sorted((self.root / "uploads" / name).glob("part-*"))
        return len(found), sum(part.stat().st_size for part in found)

    def send(self, name, number, data):
        """Take a part, whole or not at all. The last may be short."""
        self.before_part()
        assert self.parts(name) == (number, number * self.part_size)
        assert 0 < len(data) <= self.part_size
        self._write(self.root / "uploads" / name / f"part-{number:05}", data)

    def complete(self, name):
        parts = sorted((self.root / "uploads" / name).glob("part-*"))
        self.put(name, b"".join(part.read_bytes() for part in parts))

    def put(self, name, data):
        self._write(self.root / "objects" / name, data)

    def get(self, name):
        path = self.root / "objects" / name
        return path.read_bytes() if path.is_file() else None

    def _write(self, path, data):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name("sending-" + path.name)
        part.write_bytes(data)
        part.rename(path)

    def destination(self):
        return Upload(self)


class Upload(Destination):
    """A destination that is uploaded; what parts hold tells how far it came."""

    is_ascending = True

    def __init__(self, server):
        self.server = server

    @contextmanager
    def claim(self, conversion, team):
        request, source, target = conversion.request, conversion.source, conversion.target
        self.target = target
        self._layouts = FileLayoutCache(target.planner, source.indexes, target, request.crc)
        self._place = target.place.partition("://")[2]
        self.share_out(team.bcast(lambda: self.begun(conversion)), team)
        yield conversion

    def begun(self, conversion):
        """Note what is made here; return what parts of which files are there."""
        server, made = self.server, conversion_identity(conversion)
        record = json.dumps(made, sort_keys=True).encode()
        if server.get(self._name("record")) not in (None, record):
            raise StorageError(f"{self.target.dst}: holds another checkpoint; name another place")
        server.put(self._name("record"), record)
        left = [file for file in self.target.files if server.get(self._file(file)) is None]
        return {file: server.parts(self._file(file)) for file in left}

    def _name(self, name):
        return f"{self._place}/{name}"

    def _file(self, file):
        return self._name(self.target.arrangement.names[file])

    @property
    def stored_before(self):
        sent = self._sent.values()
        return StoredFiles(
            kept=len(self.target.files) - len(self._sent),
            continued=sum(number > 0 for number, _ in sent),
            bytes_before=sum(nbytes for _, nbytes in sent),
        )

    def share_out(self, sent, team):
        """Give each process whole files, without the tensors that were `sent` to their end."""
        planner, self._sent = self.target.planner, sent
        files = [[*self._sent][process :: team.size] for process in range(team.size)]
        done = {
            file: {
                name
                for name, spans in self._layouts.of(file).spans.items()
                if all(span.offset + span.nbytes <= nbytes for span in spans)
            }
            for file, (_, nbytes) in self._sent.items()
        }
        self.left = [remaining(planner, map(planner.whole_file, some), done) for some in files]
        self._mine = files[team.rank]

    def fill(self, work, inputs, on_progress):
        sinks = {
            file: PartSink(self.server, self._file(file), self._layouts.of(file), self._sent[file])
            for file in self._mine
        }
        return execute(work, inputs, sinks, on_progress)

    def publish(self, team):
        team.agree(lambda: [self.server.complete(self._file(file)) for file in self._mine])
        team.bcast(self._put_companions)

    def _put_companions(self):
        arrangement, form = self.target.arrangement, self.target.form
        companions = form.companions(self.target.planner, arrangement, self.target.training)
        for name, content in companions.items():
            self.server.put(self._name(name), b"".join(content))


class PartSink:
    """One file while it is uploaded (`rankxform.engine.pipeline.Sink`)."""

    def __init__(self, server, name, layout, sent):
        self._server, self._name, self._layout = server, name, layout
        self._number, self._first = sent
        self._end, self._buffer, self.bytes_put = None, b"", 0

    def put(self, name, start, data):
        spans, done = self._layout.spans[name], 0
        for span in spans_of_range(spans, start, len(data)) if len(data) else spans:
            head = self._layout.heads.get(span.offset)
            if head is not None:
                self._append(span.offset - len(head), head)
            self._append(span.offset, data[done : done + span.nbytes])
            done += span.nbytes

    def share(self, name, start, source, nbytes):
        return False

    def _append(self, offset, data):
        """Take the next bytes of the file; those that were sent before are not sent again."""
        if self._end is None:
            assert offset <= self._first
        else:
            assert offset == self._end
        self._end = offset + len(data)
        self._buffer += bytes(data[max(0, self._first - offset) :])
        while len(self._buffer) >= self._server.part_size:
            self._send()

    def _send(self):
        data, self._buffer = (
            self._buffer[: self._server.part_size],
            self._buffer[self._server.part_size :],
        )
        self._server.send(self._name, self._number, data)
        self._number += 1
        self.bytes_put += len(data)

    def finish(self):
        if self._buffer:
            assert self._end == self._layout.size
            self._send()
