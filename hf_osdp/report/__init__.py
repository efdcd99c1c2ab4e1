"""Tables, charts, plan files and the report file of a run."""
