"""Run a plan on FSDP2: mesh, apply, clip, scale, verify."""
