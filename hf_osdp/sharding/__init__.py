"""Lay a plan out on a model with FSDP2, and train it: clip, scale, accumulate, verify."""
