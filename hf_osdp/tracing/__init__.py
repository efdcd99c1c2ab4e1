"""Run a model on fake tensors and describe what it saves, peaks at and computes."""
