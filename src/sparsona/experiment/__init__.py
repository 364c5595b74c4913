"""Names and options become objects; train, compare, resume."""
