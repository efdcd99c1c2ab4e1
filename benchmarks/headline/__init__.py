"""The headline experiments."""
