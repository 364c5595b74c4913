"""Results of runs: statistics and tables. Importing it does not import torch."""
