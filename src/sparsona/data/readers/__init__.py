"""Readers of data sets, by file format. None needs torch."""
