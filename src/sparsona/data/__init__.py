"""Data sets, their partition among clients, and batches. Importing it imports neither torch nor numpy."""

from sparsona.data.card import SourceCard as SourceCard
from sparsona.data.catalog import SOURCES as SOURCES
