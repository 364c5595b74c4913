"""Pages and pictures out of numbers."""
