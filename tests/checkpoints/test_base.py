"""What is known of forms and containers before they are imported is what they say themselves."""

from __future__ import annotations

from importlib import import_module

import pytest

from rankxform.checkpoints.base import FORMS
from rankxform.formats.container import CONTAINERS


@pytest.mark.parametrize("registry", [FORMS, CONTAINERS], ids=["forms", "containers"])
def test_names_and_early_attributes_are_the_objects_own(registry):
    for name, place in [*registry._places.items()]:
        module, _, class_name = place.partition(":")
        fresh = getattr(import_module(module), class_name)()
        assert fresh.name == name
        for attribute, value in registry._early.get(name, {}).items():
            assert getattr(fresh, attribute) == value, (name, attribute)
