"""The engine's server half: members, instructions, replies, and the record of a round."""
