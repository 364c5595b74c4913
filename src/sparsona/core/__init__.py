"""The contract: what a task is, what a method is, what travels. Importing it does not import torch."""
