"""Entry point of `python -m fedhet`, the command line."""

import contextlib
import os
import sys

# Python searches the working directory first. Its files may be untrusted: as with the installed
# command, nothing is imported from it unless it contains this package. A working directory that
# was deleted is not searched.
with contextlib.suppress(FileNotFoundError):
    if sys.path[0] == os.getcwd() and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
        del sys.path[0]

from fedhet.cli import command

command()
