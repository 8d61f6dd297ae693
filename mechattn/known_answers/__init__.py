"""Known answers: models whose heads, patterns or texts are known beforehand, and what the library finds in them."""
