"""Prompts in, KV out layer by layer, and the first token."""
