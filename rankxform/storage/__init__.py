"""Files read: listed, indexed, compared and measured. The only file access for reading."""

from .posix_store import PosixStorage
from .store import STORAGE

STORAGE[""] = PosixStorage()
