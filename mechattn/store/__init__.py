"""Results on disk or at an address. Files of others are not touched, and what is read may come from
someone who is not trusted."""
