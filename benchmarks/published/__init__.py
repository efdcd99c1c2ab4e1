"""Estimates beside published measurements."""
