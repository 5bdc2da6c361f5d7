"""Messages between server and clients: their contracts, their encoding, and a client's identity."""
