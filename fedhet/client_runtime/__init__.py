"""The engine's client half: a node's settings, its state, and a cache of open clients."""
