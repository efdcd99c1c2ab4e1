"""Operators in slices that are gathered and used one after the other, with the names and shapes of Hugging Face kept outside."""
