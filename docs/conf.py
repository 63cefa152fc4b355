"""The site that `make docs` builds from these pages, with Sphinx."""

import re
from pathlib import Path

project = "fa_compiler"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_show_copyright = False
_version = Path(__file__).parents[1].joinpath("fa_compiler", "version.py").read_text(encoding="utf-8")
html_title = "fa_compiler " + "".join(re.findall(r'= "(.+)"', _version))
myst_enable_extensions = ["html_image"]  # an <img> in a page is copied to the site
myst_heading_anchors = 3
