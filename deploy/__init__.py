"""Starts, watches and stops: the pdserve command, the local Ray cluster, the actors, the demo."""

import deploy.ray_environment  # noqa: F401  before anything of deploy imports Ray or gRPC
