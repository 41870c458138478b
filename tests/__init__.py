"""A regular package, so that no other `tests` folder on the path can stand in for it."""
