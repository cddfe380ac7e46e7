"""What is known of forms and containers before they are imported is what they say themselves."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from rankxform.checkpoints import base
from rankxform.checkpoints.base import FORMS
from rankxform.formats.container import CONTAINERS
from rankxform.source.choose import listing_at
from rankxform.storage.store import store_at

SAMPLES = [
    path
    for folder in (Path(__file__).parents[1] / "data" / "formats").iterdir()
    for path in (folder, *folder.rglob("*"))
    if path.is_dir()
]


@pytest.mark.parametrize("registry", [FORMS, CONTAINERS], ids=["forms", "containers"])
def test_names_and_early_attributes_are_the_objects_own(registry):
    for name, place in [*registry._places.items()]:
        module, _, class_name = place.partition(":")
        fresh = getattr(import_module(module), class_name)()
        assert fresh.name == name
        for attribute, value in registry._early.get(name, {}).items():
            assert getattr(fresh, attribute) == value, (name, attribute)


@pytest.mark.parametrize(
    "folder", SAMPLES, ids=lambda path: str(path.relative_to(Path(__file__).parents[1]))
)
def test_a_form_recognizes_nothing_without_one_of_its_marks(folder):
    for name, form in FORMS.items():
        where = base.CheckpointRef(str(folder))
        listing, store = listing_at(str(folder), form, where), store_at(str(folder))
        if form.recognizes(listing, store) and name in base._MARKS:
            assert base._may_be(name, {*listing.entries, *listing.files}), name
