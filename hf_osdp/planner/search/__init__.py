"""Find the fastest plan that fits, or say what would make one fit."""
