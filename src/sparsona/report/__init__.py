"""Report pages and pictures."""
