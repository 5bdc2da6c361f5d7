"""Client runtime: node settings, client state, local training, and privacy."""
