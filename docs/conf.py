# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration: `sphinx-build -W -b html docs docs/_build`, with the extra `docs` installed."""

from pathlib import Path
import re

_VERSION = Path(__file__).resolve().parent.parent / "src" / "maxtext" / "version.py"

project = "MaxText with Megatron-LM datasets"
author = "The MaxText and Megatron branch authors"
project_copyright = author
# Read, not imported: the pages build without MaxText installed.
release = version = re.findall(r'__version__ = "(.+)"', _VERSION.read_text(encoding="utf-8"))[0]

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = True

html_theme = "furo"
html_title = f"{project} {release}"
