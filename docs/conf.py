# SPDX-License-Identifier: Apache-2.0
"""Sphinx's configuration: Markdown pages, and the reference from docstrings."""

import re

import segscatter

project = "segscatter"
author = "the segscatter authors"
project_copyright = author
version = release = segscatter.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
exclude_patterns = ["requirements.txt"]
nitpicky = False  # annotations name torch's types, whose documentation is elsewhere
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
suppress_warnings = ["myst.xref_missing"]  # links that leave docs/; tests/python/test_docs.py follows every link

ARGUMENTS = re.compile(r"(\w+(?:, \w+)*): (.*)")


def list_arguments(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings describe arguments in lines of ``name: what it is``, indented where they go on; make them lists."""
    result: list[str] = []
    in_list = False
    for line in lines:
        if (argument := ARGUMENTS.fullmatch(line)) and (in_list or not result or not result[-1]):
            names = ", ".join(f"**{part}**" for part in argument[1].split(", "))
            result.append(f"* {names}: {argument[2]}")
            in_list = True
        elif in_list and line.strip():
            result.append("  " + line.strip())
        else:
            in_list = False
            result.append(line)
    lines[:] = result


def setup(app) -> None:
    app.connect("autodoc-process-docstring", list_arguments)
