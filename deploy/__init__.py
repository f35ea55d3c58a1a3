"""Starts, watches and stops: the pdserve command, the local Ray cluster, the actors, the demo."""
