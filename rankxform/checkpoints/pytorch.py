"""Folders of PyTorch's files, as Hugging Face had them before safetensors; or one such file.

::

    pytorch_model-00001-of-00003.bin ...   whole tensors (torch.save of a state dict)
    pytorch_model.bin.index.json           {"metadata": {"total_size": N}, "weight_map": {...}}
    pytorch_model.bin                      instead of both, if one file is enough

What else of torch.save lies there, such as training_args.bin, is no model. It is read, and never
written.
"""

from __future__ import annotations

from dataclasses import replace

from rankxform.checkpoints import folders
from rankxform.errors import UsageError
from rankxform.layout.names import is_extra_state
from rankxform.storage.store import FILE, FOLDER, Listing, Store
from rankxform.values import pattern_on_use

from .base import CheckpointRef, Form, RankFilter, SelectedFiles

INDEX = ".bin.index.json"
SUFFIXES = (".bin", ".pt", ".pth")
_MODEL = pattern_on_use(
    r"(?P<prefix>[^/\0]*?)model(-(?P<number>[0-9]{5})-of-(?P<of>[0-9]{5}))?\.bin"
)


class PyTorchForm(Form):
    """A folder of PyTorch's files (`checkpoints.base.Form`)."""

    name = "pytorch"
    title = "PyTorch"
    configured = True
    gives_way = True

    def pattern(self, where: CheckpointRef) -> str:
        return "*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        """By a model's file, or its index, where no safetensors are: a folder may have both.

        One file that is named is complete, as any other is.
        """
        if listing.kind != FOLDER or any(n.endswith(folders.SUFFIX) for n in listing.entries):
            return None
        names = (n for n in listing.entries if n.endswith(INDEX) or _MODEL().fullmatch(n))
        return next(names, None)

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        folders.check_no_step(self.name, where)
        matches = {name: match for name in listing.files if (match := _MODEL().fullmatch(name))}
        index = folders.single_index(listing, INDEX)
        of_model = replace(listing, files=(*matches, *([index] if index else [])))
        alone = [name for name, match in matches.items() if match["of"] is None]
        if index is None and listing.kind != FILE:
            prefixes = sorted({match["prefix"] for match in matches.values()})
            if len(prefixes) > 1:
                raise UsageError(
                    f"holds files of two models, {prefixes[0]}model and {prefixes[1]}model",
                    "move those of one away",
                    where=listing.path,
                )
            folders.check_alone(listing, alone, [name for name in matches if name not in alone[:1]])
            folders.check_shards(listing, matches.values())
        selected = folders.whole_tensors(of_model, store, index, suffixes=SUFFIXES)
        assert selected.description is not None
        if index is not None:
            used = {*selected.names.values(), *selected.description.passed_over}
            folders.check_alone(listing, [name for name in alone if name not in used], ["an index"])
        listed = {
            file: tuple(name for name in names if not is_extra_state(name))
            for file, names in selected.description.listed.items()
        }
        # transformers left tied tensors out of total_size
        description = replace(selected.description, listed=listed, statements=())
        return replace(selected, description=description)
