"""The methods: how one declares itself, and finding them by name."""
