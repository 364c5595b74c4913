"""What runs amount to: statistics, tables and the report. Importing it does not import torch."""
