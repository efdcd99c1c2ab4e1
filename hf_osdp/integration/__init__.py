"""Accelerate and the Trainer of transformers."""
