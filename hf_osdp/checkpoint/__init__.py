"""Checkpoints that do not know of plans: written completely or not at all, read without running anything.

See docs/fault_tolerance.md.
"""
