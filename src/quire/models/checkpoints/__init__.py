"""Where a model's config and weights come from: folders, GGUF files, the hub, random numbers."""
