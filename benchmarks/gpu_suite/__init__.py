"""Everything that only a GPU can tell, in order of worth: `python -m benchmarks.gpu_suite --minutes 25 --out DIR`."""
