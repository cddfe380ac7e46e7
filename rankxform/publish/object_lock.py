"""One run at a time at an address of object storage: an object says which process works there.

Where the store creates an object only if there is none, and replaces one only if it is that which
was read, of two runs that come at once one gets it. Whether it does is found out with the lock
itself. Of other stores (some gateways) the object is read again after a while, and the run
whose object was replaced stops; that is no lock if a store is slow, and the user is told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rankxform.errors import FormatError, StorageError
from rankxform.storage.objects.multipart import ObjectHead
from rankxform.storage.objects.writing import WritablePrefix
from rankxform.values import decode_json

from .lock import DEAD_AFTER_SECONDS, FOREVER, RunLock, is_alive_here, say_line

LOCK_NAME = ".rankxform/lock"
_SETTLED_SECONDS = 2.0


class ObjectLock(RunLock):
    """Holds an address. is_exclusive: whether the store sees to it that no other run has it."""

    is_exclusive = True

    def __init__(self, prefix: WritablePrefix, say: Callable[[str], None] = say_line) -> None:
        """Take the lock. Raises StorageError where a live run has it."""
        self._prefix = prefix
        super().__init__(f"{prefix.address}/{LOCK_NAME}", prefix.address, say, "address")

    def _take_if_free(self) -> tuple[Mapping[str, Any], float, float] | None:
        mine = json.dumps(self._mine).encode()
        state = _state_of(self._prefix)
        if state is not None and state.holder != self._mine:
            is_silent = state.seconds <= 0 or (state.holder, state.written) == self._silent
            if not is_silent:
                return state.holder, state.seconds, state.written
        if state is None:
            taken = self._prefix.put_new(LOCK_NAME, mine)
        else:
            taken = self._prefix.put_instead(LOCK_NAME, mine, state.etag)
        if taken is None:  # another one was faster
            return self._take_if_free()
        try:
            if self._prefix.put_new(LOCK_NAME, mine) is not None:
                self.is_exclusive = False
                time.sleep(_SETTLED_SECONDS)
                if (holder := _holder(self._prefix.read(LOCK_NAME))) != self._mine:
                    return holder or {}, FOREVER, 0.0
        except StorageError:
            self._remove()
            raise
        return None

    def _renew(self) -> None:
        state = _state_of(self._prefix)
        if state is not None and state.holder == self._mine:
            self._prefix.put_instead(LOCK_NAME, json.dumps(self._mine).encode(), state.etag)

    def check(self) -> None:
        if _holder(self._prefix.read(LOCK_NAME)) != self._mine:
            raise StorageError(
                "another run has taken this address over; this one stops",
                where=self._prefix.address,
            )

    def _remove(self) -> None:
        self._prefix.close()
        quick = WritablePrefix(self._prefix.address, patient=False)
        with suppress(StorageError):  # it is let go in a while, by its age
            if _holder(quick.read(LOCK_NAME)) == self._mine:
                quick.remove([LOCK_NAME])


class _LockState:
    """What a lock says: who holds it, when it was renewed, and after how many seconds that one is
    dead."""

    def __init__(self, holder: Mapping[str, Any], head: ObjectHead) -> None:
        alive = is_alive_here(holder)
        self.holder, self.etag = holder, head.etag
        self.written = head.written if alive is None else 0.0
        by_age = max(0.0, DEAD_AFTER_SECONDS - head.age) if head.written else FOREVER
        self.seconds = by_age if alive is None else FOREVER if alive else 0.0


def _state_of(prefix: WritablePrefix) -> _LockState | None:
    """Return what a lock says; None where there is none."""
    head, data = prefix.uploads.head(prefix.key(LOCK_NAME)), prefix.read(LOCK_NAME)
    if head is None or data is None:
        return None
    return _LockState(_holder(data) or {}, head)


def _holder(data: bytes | None) -> dict[str, Any] | None:
    try:
        holder = decode_json(data or b"")
    except FormatError:
        return None
    return holder if isinstance(holder, dict) else None
