"""Folder conventions of checkpoints: which file is which, and where a new one belongs."""

from .base import FORMS
from .rank_folders import RankFolders

FORMS.update({one.name: one for one in (RankFolders(),)})
