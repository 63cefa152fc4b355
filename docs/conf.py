"""The site that `make docs` builds from these pages, with Sphinx."""

project = "fa_compiler"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "fa_compiler"
myst_heading_anchors = 3
