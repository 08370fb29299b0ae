"""Block images in packs on a shared mount or in an object store: slow, huge, cheap, persistent."""
