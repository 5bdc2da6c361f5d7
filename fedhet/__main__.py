"""`python -m fedhet` is the command line."""

from fedhet.cli import main

main()
