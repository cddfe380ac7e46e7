"""Plugins must be named in the root folder."""

from hypothesis import settings

pytest_plugins = ["tests.mpi_launch"]

settings.register_profile("patient", deadline=None)  # no timed assertions, here neither
settings.load_profile("patient")
