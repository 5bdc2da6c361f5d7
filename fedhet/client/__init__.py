"""The engine's client half: what a node is, what it keeps, clients kept open."""
