"""`python -m sparsona` is the command line."""

from sparsona.cli import main

main()
