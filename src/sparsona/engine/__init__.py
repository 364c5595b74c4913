"""Turns, rounds with a server or among peers, and evaluation. Methods are passed in, never imported."""
