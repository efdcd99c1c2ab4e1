"""Thin ends: the Trainer of transformers, Accelerate, and a plain PyTorch loop."""
