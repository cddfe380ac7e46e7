"""Folder conventions of checkpoints: which file is which, and where a new one belongs."""

from .base import FORMS
from .checkpoint2 import Checkpoint2Form
from .dcp import DcpForm, DcpSafetensorsForm, HyperParallelForm
from .huggingface import HuggingFaceForm
from .rank_folders import RankFoldersForm
from .torch_dist import TorchDistForm
from .unified import UnifiedForm

FORMS.update(
    {
        form.name: form
        for form in (
            RankFoldersForm(),
            Checkpoint2Form(),
            UnifiedForm(),
            HuggingFaceForm(),
            DcpForm(),
            HyperParallelForm(),
            DcpSafetensorsForm(),
            TorchDistForm(),
        )
    }
)
