"""Process groups, meshes and collectives; agreement of ranks; the end of a run."""
