"""`python -m sparsona` is the command line."""

import os
import sys

# `python -m` looks for modules in the current folder first, whose files nobody meant to run, as `sparsona` does not.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()] != [os.path.dirname(os.path.dirname(__file__))]:
    del sys.path[0]

from sparsona.cli import main

main()
