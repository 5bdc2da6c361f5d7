"""Server side of a federation: members, calls, instructions, replies, and the state of a round."""
