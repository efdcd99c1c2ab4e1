"""Adapters for transformers' Trainer, Accelerate, and plain PyTorch loops."""
