"""Data sets in the formats people have them in. Nothing here needs torch."""
