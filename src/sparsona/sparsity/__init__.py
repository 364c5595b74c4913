"""Densities, masks and their evolution: a vocabulary of functions. Importing it does not import torch."""
