"""Plugins must be named in the root folder."""

pytest_plugins = ["tests.mpi_launch"]
