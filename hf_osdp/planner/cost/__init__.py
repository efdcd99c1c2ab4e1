"""Memory and time of a plan, unit by unit."""
