"""Folder conventions of checkpoints: which file is which, and where a new one belongs."""

from .base import FORMS
from .checkpoint2 import Checkpoint2
from .dcp import Dcp
from .dcp_safetensors import DcpSafetensors
from .huggingface import HuggingFace
from .hyperparallel import HyperParallel
from .rank_folders import RankFolders
from .torch_dist import TorchDist
from .unified import Unified

FORMS.update(
    {
        form.name: form
        for form in (
            RankFolders(),
            Checkpoint2(),
            Unified(),
            HuggingFace(),
            Dcp(),
            HyperParallel(),
            DcpSafetensors(),
            TorchDist(),
        )
    }
)
