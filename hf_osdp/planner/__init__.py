"""Describe, cost, search: pure functions over values.

Reading order: description, hardware, job, costs, memory, timing, search, plan.
"""
