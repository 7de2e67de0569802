"""Small whole repositories by older releases of the official engine, and how they were made."""
