"""Entry point of `python -m fedhet`, the command line."""

import contextlib
import os
import sys

# Python searches the working directory first, but its files may be untrusted. Remove it from the
# path, as with the installed command, unless it contains this package. Python does not search a
# deleted working directory.
with contextlib.suppress(FileNotFoundError):
    if sys.path[0] == os.getcwd() and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
        del sys.path[0]

from fedhet.cli import command

command()
