"""Build runs from names and options; train, compare, resume."""
