"""Messages between server and clients: contracts, encodings, and client descriptions."""
