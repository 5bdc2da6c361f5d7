"""Client-side classes, one file per method."""
