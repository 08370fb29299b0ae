"""Products of activations in int8 with weights as GGUF files have them, on a CPU."""
