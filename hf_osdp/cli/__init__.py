"""`hf-osdp`: the planner from the shell."""
