"""`make gpu`: its stages, and the ones that measure no time."""
