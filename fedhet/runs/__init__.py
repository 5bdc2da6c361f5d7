"""Run directories: files, records, logs, and the display of progress."""
