"""HTML pages of results, and views of one prompt."""
