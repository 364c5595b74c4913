"""The first numbers of every vocabulary. Free of torch."""

# Padding is neither trained nor scored; the others are trained, but not scored.
PAD, BEGIN, END, UNKNOWN = range(4)
NUM_SPECIAL = 4
