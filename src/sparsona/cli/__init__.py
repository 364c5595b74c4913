"""The command line: one file a group of commands."""

from sparsona.cli.app import main as main
