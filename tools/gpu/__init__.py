"""`make gpu`: the list of its stages, and the stages that measure no time."""
