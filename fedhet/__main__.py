"""Entry point of `python -m fedhet`, the command line."""

import contextlib
import os
import sys

# Python searches the working directory first, but its files may be untrusted. Remove the directory
# from the search path unless it contains this package; the installed command does not search it
# either. If the directory was deleted, Python does not search it.
with contextlib.suppress(FileNotFoundError):
    if sys.path[0] == os.getcwd() and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
        del sys.path[0]

from fedhet.cli import command

command()
