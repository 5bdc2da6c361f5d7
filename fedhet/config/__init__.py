"""Settings of a run: reading, validation and completion; and finding methods by name."""
