"""One small file a family: which foreign configs it takes, and how they become a ModelSpec."""
