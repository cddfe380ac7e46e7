"""What every destination keeps to, by any number of processes, written once."""

from __future__ import annotations

import pytest

import rankxform
from rankxform.engine import in_memory
from rankxform.errors import CheckpointError, StorageError, UsageError
from rankxform.request import Request
from rankxform.storage.source_reader import SourceReader
from rankxform.target.destination import DESTINATIONS
from rankxform.verbs.transform import transform_one_rank
from tests import reference
from tests.mpi.conftest import prepare
from tests.mpi_launch import world
from tests.toy_forms import CASE
from tests.toy_uploads import Server


def of_rank(rank):
    """Return what a destination rank holds, {name: (type, shape, bytes)}."""
    return {
        name: (CASE.params[name][1], words.shape, words.tobytes())
        for name, layout in CASE.dst[0].items()
        for words in [
            reference.shard(reference.full_tensor(name, *CASE.params[name]), layout, rank)
        ]
    }


class DestinationTests:
    """The laws of a destination. Of six ranks, or of those that `ranks` names."""

    keeps = True  # whether what is complete is kept by the next run
    is_shared = True  # by processes that work together
    kind = "ckpt"

    @pytest.fixture(autouse=True)
    def source(self, tmp):
        self.tmp = tmp
        self.src, self.a, self.b = prepare(CASE, tmp, self.kind)
        self.options = {"comm": world(), "fsync": False}

    def store(self, **options):
        """Convert; return what the verb does. Collective."""

    def held(self):
        """Return by rank what a reader finds, of what is complete; of this process's alone, if
        each has its own."""

    @pytest.mark.world(sizes=(1, 2, 3))
    def test_every_slice_comes_where_it_belongs(self):
        self.store()
        found = self.held()
        assert found and found == {rank: of_rank(rank) for rank in found}

    @pytest.mark.world(sizes=(1, 2, 3))
    def test_what_fails_on_one_process_fails_on_all_and_can_be_done_again(self, monkeypatch):
        real, reads = SourceReader.read, []

        def read(*arguments):
            reads.append(arguments)
            if len(reads) == 2 and not (self.is_shared and world().rank):
                raise StorageError("the disk broke")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(SourceReader, "read", read)
            with pytest.raises(StorageError, match="the disk broke"):
                self.store()
        world().Barrier()
        found = self.held()
        assert found == {rank: of_rank(rank) for rank in found}, "what is complete is right"
        world().Barrier()
        self.store()
        found = self.held()
        assert found and found == {rank: of_rank(rank) for rank in found}

    @pytest.mark.world(sizes=(1, 2, 3))
    def test_a_source_that_is_torn_leaves_nothing(self):
        if world().rank == 0:
            path = next((self.src / "rank_2").iterdir())
            path.write_bytes(path.read_bytes()[:-8])
        world().Barrier()
        with pytest.raises(CheckpointError):
            self.store()
        assert self.held() == {}

    @pytest.mark.world(sizes=(1, 3))
    def test_what_is_complete_is_kept(self):
        if not self.keeps:
            pytest.skip("it starts over")
        self.store()
        assert self.store().files_kept == 6


class TestFolder(DestinationTests):
    def store(self, **options):
        return rankxform.transform(
            self.src, self.tmp / "dst", self.a, self.b, **self.options, **options
        )

    def held(self):
        return {
            int(path.parent.name.removeprefix("rank_")): reference.read_any(path)
            for path in (self.tmp / "dst").glob(f"rank_*/*.{self.kind}")
        }


class TestArrays(DestinationTests):
    keeps = False

    def store(self):
        self.found = {}
        arrays = rankxform.load(self.src, self.a, self.b, rank=world().rank + 2, comm=world())
        self.found = {
            world().rank + 2: {
                name: (CASE.params[name][1], array.shape, array.tobytes())
                for name, array in arrays.items()
            }
        }

    def held(self):
        return self.found


class TestLargeArrays(TestArrays):
    """Small ones, which are filled as large ones are: without buffers between."""

    @pytest.fixture(autouse=True)
    def in_place(self, monkeypatch):
        monkeypatch.setattr(in_memory, "_LEAST_BYTES", 0)


class TestOneFile(DestinationTests):
    """Each process writes one of its own, as MindSpore's `transform_checkpoint_by_rank` does."""

    keeps = is_shared = False

    def store(self):
        rank = world().rank
        request = Request(str(self.src), None, str(self.a), str(self.b), ranks=(rank,))
        transform_one_rank(request, self.tmp / f"{rank}.ckpt")

    def held(self):
        path = self.tmp / f"{world().rank}.ckpt"
        return {world().rank: reference.read_any(path)} if path.exists() else {}


class TestUploads(DestinationTests):
    """Parts from first to last, of a destination from outside."""

    @pytest.fixture(autouse=True)
    def registered(self, source, monkeypatch):
        self.server = Server(self.tmp / "server", 1000, self.before_part)
        self.of_run, self.breaks = 0, False
        monkeypatch.setitem(DESTINATIONS, "parts", self.server.destination)

    def before_part(self):
        self.of_run += 1
        if self.breaks and self.of_run == 2:
            raise StorageError("the connection broke")

    def store(self, **options):
        self.of_run = 0
        return rankxform.transform(
            self.src, "parts://run", self.a, self.b, **self.options, **options
        )

    def held(self):
        found = {}
        for path in (self.tmp / "server/objects").rglob(f"*.{self.kind}"):
            found[int(path.parent.name.removeprefix("rank_"))] = reference.read_any(path)
        return found

    @pytest.mark.world(sizes=(1, 2, 3))
    def test_the_connection_breaks_at_every_part(self):
        """The next run goes on with that part."""
        runs, self.breaks = 1, True
        while not self.ended():
            runs += 1
        sent = [*(self.tmp / "server/uploads").rglob("part-*")]
        assert runs * world().size >= len(sent) > 20
        assert self.held() == {rank: of_rank(rank) for rank in range(6)}

    def ended(self):
        try:
            self.store()
        except StorageError:
            return False
        return True

    @pytest.mark.world(sizes=(1, 2, 3))
    def test_what_cannot_be_is_refused(self, monkeypatch):
        self.store()
        with pytest.raises(StorageError, match="^parts://run: holds another checkpoint"):
            self.store(exclude=["c"])
        with pytest.raises(UsageError, match="leave out --read-method two-phase"):
            self.store(read_method="two-phase")
        monkeypatch.delitem(DESTINATIONS, "parts")
        with pytest.raises(UsageError, match="^parts://run: nothing writes parts:// addresses"):
            self.store()


class TestUploadsOfSafetensors(TestUploads):
    kind = "safetensors"
