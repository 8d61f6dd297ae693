"""One object for every comparison of two conditions, and what else is read off a result."""
