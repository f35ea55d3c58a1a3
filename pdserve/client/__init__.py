"""The Python client of pdserve.v1.Inference.

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)
        result = client.complete([("user", "Why is the sky blue?")], temperature=0)
        print(result.text, result.finish_reason, result.ttft_ms)

`AsyncClient` is its twin for asyncio. Every failure is one of pdserve.errors. The client does not retry: a request the
router accepted is carried through worker failures by the router, and one it refused says why.
"""

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
