"""Tests and measurements that need a GPU, the most informative first: `python -m benchmarks.gpu_suite --minutes 25
--out DIR`.
"""
