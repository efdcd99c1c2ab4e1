"""Find the fastest plan that fits, or name changes with which one fits."""
