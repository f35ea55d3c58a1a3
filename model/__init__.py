"""One decoder for the Llama, Qwen2 and Qwen3 families: its configuration, weights and forward pass; the embedded model."""
