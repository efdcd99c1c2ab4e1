"""Parts of `benchmarks/published.py`."""
