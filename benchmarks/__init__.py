"""Benchmarks: whole commands and parts of them, in one run with what they are compared with.

Byte code is kept, as an installation keeps it.
"""

import os

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
