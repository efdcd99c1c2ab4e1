"""Checks before a run starts: what would go wrong, with its remedy."""
