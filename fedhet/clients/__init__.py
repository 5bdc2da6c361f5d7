"""Client-side classes, one file per method that does not use another method's client."""
