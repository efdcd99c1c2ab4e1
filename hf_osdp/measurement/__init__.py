"""Measure the machine, the links, and the steps of a run."""
