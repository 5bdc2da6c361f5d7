"""Entry point of `python -m fedhet`, the command line."""

from fedhet.cli import main

main()
