"""From a module to a description, from a machine to a hardware description."""
