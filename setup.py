"""All metadata is in setup.cfg; this file serves tools that ask for a setup.py."""

from setuptools import setup

setup()
