"""Folder conventions of checkpoints: which file is which, and where a new one belongs."""

from .base import FORMS
from .checkpoint2 import Checkpoint2
from .huggingface import HuggingFace
from .rank_folders import RankFolders
from .unified import Unified

FORMS.update({one.name: one for one in (RankFolders(), Checkpoint2(), Unified(), HuggingFace())})
