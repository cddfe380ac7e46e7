"""Files read: listed, indexed, compared and measured. The only file access for reading."""

from .posix_store import Posix
from .store import STORAGE

STORAGE[""] = Posix()
