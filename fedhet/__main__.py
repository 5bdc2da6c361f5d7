"""Entry point of the command line, started with `python -m fedhet`."""

import contextlib
import os
import sys

# Python searches the working directory first, but its files may be untrusted. Remove the directory
# from the search path unless it contains this package. The installed command `fedhet` does not
# search the working directory either. `os.getcwd` fails if the directory has been deleted.
with contextlib.suppress(FileNotFoundError):
    if sys.path[0] == os.getcwd() and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
        del sys.path[0]

from fedhet.cli import command

command()
