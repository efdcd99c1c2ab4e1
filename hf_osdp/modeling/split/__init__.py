"""Split operators into slices that are gathered one after the other; state dicts keep Hugging Face names and
shapes.
"""
