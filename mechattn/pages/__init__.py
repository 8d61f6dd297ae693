"""Pages: one HTML file of results, and one prompt at a glance."""
