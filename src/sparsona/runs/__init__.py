"""A run is a folder: its options, its records, and the checkpoint it is resumed from."""
