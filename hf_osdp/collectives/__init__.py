"""Collectives of our own beneath FSDP2: in two stages across nodes, and a reduce-scatter for gloo. Design: docs/two_machines.md."""
