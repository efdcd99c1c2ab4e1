"""Accelerate, the Trainer and notebooks."""
