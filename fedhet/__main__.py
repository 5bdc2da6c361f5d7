"""Entry point of `python -m fedhet`, the command line."""

import os
import sys

# Python puts the working folder before all others. Somebody else may have filled it: as with the
# installed command, nothing is imported from it, unless it is this package's own.
if sys.path[0] == os.getcwd() and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from fedhet.cli import command

command()
