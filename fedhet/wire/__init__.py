"""What travels between server and clients: who sends it, what it may hold, how it is encoded."""
