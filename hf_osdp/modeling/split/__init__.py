"""Operators in slices that are gathered one after the other; Hugging Face names and shapes are kept outside."""
