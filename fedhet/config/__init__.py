"""Settings of a run: reading, validation, and completion."""
