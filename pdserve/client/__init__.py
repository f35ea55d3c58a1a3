"""The Python client of pdserve.v1.Inference.

    with Client("127.0.0.1:50051,127.0.0.1:50052") as client:
        for delta in client.generate("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)
        result = client.complete([("user", "Why is the sky blue?")], temperature=0)
        print(result.text, result.finish_reason, result.ttft_ms)

`AsyncClient` is its twin for asyncio. Every failure is one of pdserve.errors.

The router carries a request through the loss of workers. The client carries it through the loss of the router: a stream
that breaks off goes on at the next router that serves, or at the same one once it is back, with the tokens it has. No
text reaches the caller twice. A router that is full then is asked again; one that is shutting down, or has no worker,
is left for the next. What a router refuses for another reason, or because it is full before anything has started, is
the caller's to know, and is not tried again. `resume.py` has the rules.

The names here are loaded when they are first used: `pdserve.client.resume` does not need gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.client.aio import AsyncClient, AsyncStream
    from pdserve.client.blocking import Client, Stream
    from pdserve.client.request import GenerateOptions, Message, Prompt
    from pdserve.client.stream import Delta, Result, Started, TokenLogprob

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Delta",
    "GenerateOptions",
    "Message",
    "Prompt",
    "Result",
    "Started",
    "Stream",
    "TokenLogprob",
]

_HOMES = {
    "pdserve.client.aio": ("AsyncClient", "AsyncStream"),
    "pdserve.client.blocking": ("Client", "Stream"),
    "pdserve.client.request": ("GenerateOptions", "Message", "Prompt"),
    "pdserve.client.stream": ("Delta", "Result", "Started", "TokenLogprob"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
