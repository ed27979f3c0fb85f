"""`make gpu`: its stages, and those of them that measure no time."""
