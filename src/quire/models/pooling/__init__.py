"""Models that answer with one vector for a text: embeddings, classes, scores."""
