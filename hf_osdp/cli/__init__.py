"""The command line, `hf-osdp`."""
