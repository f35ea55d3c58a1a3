"""One decoder for the Llama, Qwen2 and Qwen3 families: configuration, weights, forward pass; the embedded model."""
