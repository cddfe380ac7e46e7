"""What every kind of storage keeps to, written once; a subclass says how files come there."""

from __future__ import annotations

import pytest

from rankxform.errors import CheckpointError, StorageError
from rankxform.storage.store import FOLDER, NOTHING, STORAGE, JoinedStore, storage_of, store_at
from tests.toy_storage import Memory

FILES = {
    "rank_0/a.ckpt": b"first",
    "rank_1/a.ckpt": b"second",
    "rank_10/b.ckpt": b"third",
    "rank_x/a.ckpt": b"no rank",
    "index.json": b"{}",
}


class StoreTests:
    """The laws of a place. A subclass has `put`, which writes one file below it, and `place`."""

    @pytest.fixture
    def store(self, tmp_path):
        for name, content in FILES.items():
            self.put(tmp_path, name, content)
        return store_at(self.place(tmp_path))

    def test_patterns_choose_files_and_entries_are_all(self, store):
        listing = store.list("rank_{rank}/*")
        assert sorted(listing.files) == ["rank_0/a.ckpt", "rank_1/a.ckpt", "rank_10/b.ckpt"]
        assert {*listing.entries} == {name.split("/")[0] for name in FILES}
        assert listing.kind == FOLDER and "index.json" not in listing.folders
        assert store.list("*").files == ("index.json",)
        assert store.list("rank_{rank}/b*").files == ("rank_10/b.ckpt",)
        assert store.list("*/c").files == ()

    def test_documents_are_read_whole_and_files_by_ranges(self, store):
        assert store.read("index.json") == b"{}" and store.has("index.json")
        with store.open("rank_0/a.ckpt") as file:
            assert (file.version.size, file.read_at(1, 3)) == (5, b"irs")

    def test_what_is_not_there_is_an_error(self, store, tmp_path):
        assert not store.has("rank_2/a.ckpt")
        with pytest.raises((CheckpointError, StorageError)):
            store.read("rank_2/a.ckpt")
        assert store_at(self.place(tmp_path) + "/nowhere").list("*").kind == NOTHING

    def test_ranges_are_read_to_their_last_byte_or_not_at_all(self, store, tmp_path):
        address = self.place(tmp_path) + "/rank_1/a.ckpt"
        ranges = storage_of(address).ranges()
        for is_sparse in (False, True):
            room = memoryview(bytearray(4))
            ranges.read(address, 2, room, is_sparse)
            assert bytes(room) == b"cond"
            with pytest.raises((CheckpointError, StorageError)):
                ranges.read(address, 3, room, is_sparse)
        ranges.close()

    def test_a_file_that_is_replaced_has_another_version(self, store, tmp_path):
        address = self.place(tmp_path) + "/rank_1/a.ckpt"
        ranges = storage_of(address).ranges()
        before = ranges.version_now(address)
        assert before == ranges.version(address)
        self.put(tmp_path, "rank_1/a.ckpt", b"another")
        assert ranges.version_now(address) != before
        assert ranges.version_now(address + "x") is None
        ranges.close()


class TestPosix(StoreTests):
    def put(self, folder, name, content):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        fresh = path.with_name("fresh")
        fresh.write_bytes(content)
        fresh.replace(path)

    def place(self, folder):
        return str(folder)


class TestMemory(StoreTests):
    """A kind from outside."""

    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch):
        self.memory = Memory()
        monkeypatch.setitem(STORAGE, "mem", self.memory)

    def put(self, folder, name, content):
        self.memory.files[f"{self.place(folder)}/{name}"] = content

    def place(self, folder):
        return "mem://here"


class TestJoined(TestPosix):
    """Two places as one: every second file lies in the other, and one in both."""

    # They are read where they lie.
    test_ranges_are_read_to_their_last_byte_or_not_at_all = None
    test_a_file_that_is_replaced_has_another_version = None

    @pytest.fixture
    def store(self, tmp_path):
        places = [tmp_path / "first", tmp_path / "second"]
        for place in places:
            place.mkdir()
        for number, (name, content) in enumerate(FILES.items()):
            for place in places if name == "index.json" else [places[number % 2]]:
                self.put(place, name, content)
        return JoinedStore([store_at(str(place)) for place in places])
