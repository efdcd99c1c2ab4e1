"""What the host spends on a step."""
