"""Sphinx's configuration: `make docs` builds the site in build/docs."""

from fedhet import __version__

project = "fedhet"
author = "The fedhet maintainers"
copyright = f"2026, {author}"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_fence_as_directive = ["math"]  # as GitHub shows formulas
myst_heading_anchors = 4  # the anchors of headings are GitHub's

default_role = "code"  # docstrings put names between single backticks
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "fedhet"
html_theme_options = {"top_of_page_buttons": []}

# `make docs-links` asks the web; what lies in docs/ is checked by every build.
linkcheck_timeout = 20
linkcheck_retries = 2


def _plain(app, what, name, obj, options, lines):
    """Show the asterisks of docstrings, which are plain text, as they are."""
    lines[:] = [line.replace("*", r"\*") for line in lines]


def setup(app):
    """Connect what Sphinx calls while it builds."""
    app.connect("autodoc-process-docstring", _plain)
