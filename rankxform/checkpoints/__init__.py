"""Folder conventions of checkpoints: which file is which, and where a new one belongs."""

from . import rank_folders  # it registers itself

__all__ = ["rank_folders"]
