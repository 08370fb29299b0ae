"""Where block images rest outside the device: the same bytes in host memory, on disk, far away."""
