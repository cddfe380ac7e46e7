"""The documentation as a site: `pip install '.[docs]'`, then `make site`."""

project = "rankxform"
extensions = ["myst_parser"]
html_extra_path = ["notebook.ipynb", "page.schema.json"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["README.md"]
myst_heading_anchors = 3
html_theme = "furo"
smartquotes = False  # two dashes are an option's
html_title = "rankxform"
html_copy_source = False
