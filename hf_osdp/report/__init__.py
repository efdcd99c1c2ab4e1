"""What a person reads: tables and the report file."""
