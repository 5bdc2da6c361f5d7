"""What trains the clients of a run: this process, or the workers of Ray."""
