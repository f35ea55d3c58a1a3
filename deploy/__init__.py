"""Starts, watches and stops: the pdserve command, the local Ray cluster, the actors, the demo."""

import deploy.ray_environment  # noqa: F401  before anything of deploy imports Ray or gRPC
from deploy.installation import foreign_module

if (_foreign := foreign_module()) is not None:
    raise ImportError(_foreign)
