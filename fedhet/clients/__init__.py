"""Client classes. A method without a module here uses the client of another method."""
