"""Settings: the schema of a table, and the declarations of all settings that every run has."""
