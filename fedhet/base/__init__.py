"""What everything else builds on: arrays, errors, seeds, metrics, and files on disk."""
