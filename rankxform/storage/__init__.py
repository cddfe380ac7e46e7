"""Files read: listed, indexed, compared and measured. The only file access for reading."""

from .store import STORAGE, PosixStorage

STORAGE[""] = PosixStorage()
