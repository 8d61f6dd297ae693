"""What a paper published, beside what a model of yours shows and what untrained weights show."""
