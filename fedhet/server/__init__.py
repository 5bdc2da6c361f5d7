"""The engine's server half: members, instructions out, replies in, the round's record."""
