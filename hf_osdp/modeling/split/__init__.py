"""Operators in slices that are gathered one after the other, and the loss in chunks; state dicts keep Hugging Face
names and shapes.
"""
