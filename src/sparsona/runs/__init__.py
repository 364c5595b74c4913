"""A run is a folder: what was asked for, what happened, and how to go on."""
