"""Tickets out, KV in, continuous batching, tokens out."""
