"""One run at an address: where a store creates objects exclusively, and where it does not."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rankxform.errors import StorageError
from rankxform.publish import lock, object_lock
from rankxform.publish.object_lock import LOCK_NAME, ObjectLock
from rankxform.storage.objects.multipart import ObjectHead

ELSEWHERE = {"host": "other", "boot": "b", "namespace": "n", "pid": 7, "start": 1, "token": "t"}


class Place:
    """A prefix in memory. obeys: whether it looks at what is there before it creates."""

    address = "s3://bucket/new"

    def __init__(self, obeys=True):
        self.objects, self.obeys, self.age, self.written = {}, obeys, 0.0, 1.0
        self.uploads = SimpleNamespace(head=self.head)

    def key(self, name):
        return name

    def head(self, name):
        data = self.objects.get(name)
        return (
            None
            if data is None
            else ObjectHead(len(data), f"{hash(data)}", {}, self.written, self.age)
        )

    def read(self, name):
        return self.objects.get(name)

    def put(self, name, data):
        self.objects[name] = data
        return f"{hash(data)}"

    def put_new(self, name, data):
        return None if self.obeys and name in self.objects else self.put(name, data)

    def put_instead(self, name, data, etag):
        is_there = name in self.objects and f"{hash(self.objects[name])}" == etag
        return self.put(name, data) if is_there or not self.obeys else None

    def remove(self, names):
        for name in names:
            self.objects.pop(name, None)

    def close(self):
        pass


@pytest.fixture(params=[True, False], ids=["exclusive", "not exclusive"])
def place(request, monkeypatch):
    made = Place(request.param)
    monkeypatch.setattr(object_lock, "WritablePrefix", lambda address, patient: made)
    monkeypatch.setattr(object_lock, "_SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.0)
    return made


def test_a_lock_is_held_until_it_is_released(place):
    taken = ObjectLock(place)
    assert taken.is_exclusive == place.obeys
    taken.check()
    with pytest.raises(StorageError, match="works on this address"):
        ObjectLock(place)
    taken.release()
    assert place.objects == {}
    ObjectLock(place).release()


def test_that_of_a_dead_process_of_this_machine_is_taken_at_once(place):
    dead = {**lock.this_process(), "pid": 1 << 22, "token": "dead"}
    place.put(LOCK_NAME, json.dumps(dead).encode())
    taken = ObjectLock(place)
    taken.check()
    taken.release()


def test_a_run_elsewhere_is_waited_for_until_it_is_dead_or_heard_of(place):
    place.put(LOCK_NAME, json.dumps(ELSEWHERE).encode())
    said = []
    place.age = lock.DEAD_AFTER_SECONDS - 5

    def say(line):
        said.append(line)
        place.age = lock.DEAD_AFTER_SECONDS + 1

    ObjectLock(place, say).release()
    assert "if nothing is heard of it in 5 s" in said[0]
    place.put(LOCK_NAME, json.dumps(ELSEWHERE).encode())
    place.age = 1.0

    def renew(line):
        place.written += 10

    with pytest.raises(StorageError, match="process 7 on other works on this address"):
        ObjectLock(place, renew)


def test_a_run_whose_lock_was_replaced_stops(place, monkeypatch):
    """Of two that come at once, where the store cannot lock."""
    if not place.obeys:
        real = place.put_new

        def put_new(name, data):
            etag = real(name, data)
            monkeypatch.setattr(place, "put_new", real)
            place.put(name, json.dumps(ELSEWHERE).encode())
            return etag

        monkeypatch.setattr(place, "put_new", put_new)
        monkeypatch.setattr(
            object_lock.time,
            "sleep",
            lambda seconds: place.put(LOCK_NAME, json.dumps(ELSEWHERE).encode()),
        )
        with pytest.raises(StorageError, match="works on this address"):
            ObjectLock(place)
        assert json.loads(place.read(LOCK_NAME)) == ELSEWHERE, "the other one's stays"
        return
    taken = ObjectLock(place)
    place.put(LOCK_NAME, json.dumps(ELSEWHERE).encode())
    with pytest.raises(StorageError, match="another run has taken this address over"):
        taken.check()
    taken.release()
    assert json.loads(place.read(LOCK_NAME)) == ELSEWHERE


def test_a_dead_lock_dated_in_the_future_is_waited_for_as_long_as_any(monkeypatch):
    monkeypatch.setattr(lock, "DEAD_AFTER_SECONDS", 0.5)
    monkeypatch.setattr(object_lock, "DEAD_AFTER_SECONDS", 0.5)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.1)
    place = Place()
    place.objects[LOCK_NAME], place.age = json.dumps(ELSEWHERE).encode(), -1e9
    told = []
    ObjectLock(place, told.append)._ended.set()
    assert len(told) == 1
    assert json.loads(place.objects[LOCK_NAME]) != ELSEWHERE
