"""An engine's device memory as blocks with images, however its tensors are laid out."""
