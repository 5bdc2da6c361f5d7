"""Client side of the engine: node settings, client state, local training, and privacy."""
