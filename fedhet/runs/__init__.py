"""Run directories: files, records, logs, and displays of a run's progress."""
