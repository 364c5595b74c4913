"""Bytes: packed, checked, counted."""
