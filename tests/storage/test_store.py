"""Kinds of storage, by their addresses."""

from __future__ import annotations

from rankxform.storage.store import STORAGE, absolute, is_path
from tests.toy_storage import Memory


def test_an_address_of_no_known_kind_is_a_path(monkeypatch):
    monkeypatch.setitem(STORAGE, "mem", Memory())
    assert is_path("a/b") and is_path("other://a") and not is_path("mem://a")
    assert absolute("mem://a/../b") == "mem://a/../b"
    assert absolute("a").startswith("/")
