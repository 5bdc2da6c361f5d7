"""A federation over gRPC: keys, Flower's command line, a whole deployment on this machine."""
