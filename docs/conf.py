"""The documentation site. `make docs` builds it into build/docs/; a warning is an error."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # where command_reference is

project = "ray_yolo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "command_reference"]

html_theme = "furo"
html_title = "ray_yolo"
html_show_copyright = html_show_sourcelink = False
myst_heading_anchors = 3  # so that a link to a heading is the same here and where Markdown is read as it is
smartquotes = False  # flags begin with two hyphens
default_role = "code"  # what single backticks are in docstrings
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
