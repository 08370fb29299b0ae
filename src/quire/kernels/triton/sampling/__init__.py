"""Drawing tokens on the GPU, without a sort."""
