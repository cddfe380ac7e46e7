"""The documentation as a site: `pip install '.[docs]'`, then `make site`."""

import re
from pathlib import Path

project = "rankxform"
version = release = re.search(
    r'__version__ = "(.+)"', (Path(__file__).parents[1] / "rankxform" / "__init__.py").read_text()
)[1]
extensions = ["myst_parser"]
html_extra_path = ["notebook.ipynb", "page.schema.json"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["README.md"]
myst_heading_anchors = 3
html_theme = "furo"
highlight_language = "none"  # blocks without a language are commands and what they print
smartquotes = False  # two dashes are an option's
html_title = f"rankxform {release}"
html_copy_source = False
