"""One object for every comparison of two conditions, and other tables of a result."""
