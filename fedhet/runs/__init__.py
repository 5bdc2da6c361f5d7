"""A run's directory: its records, its log, and what a person sees while it goes on."""
