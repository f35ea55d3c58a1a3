"""`pdserve generate` writes the model's text as it is, whatever stdout is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from pdserve.rpc import inference_pb2 as pb
from pdserve.rpc import inference_pb2_grpc

TEXTS = (
    "\tdef f():\r\n\t\treturn 1\n",
    " :100: :smile: [bold]no[/bold] [link=x]",
    "\x00\x07\x08\x1b[31mred\x1b[0m\x7f\u0085\u2028",
    "日本語 👩‍👩‍👧‍👦 e\u0301 مرحبا \u202e \ufeff\ufffd",
    "a line that is much longer than any terminal is wide " * 5,
    "  trailing \n\n",
)


class Talker(inference_pb2_grpc.InferenceServicer):
    """Says TEXTS, in as many outputs as it is asked for."""

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        outputs = range(request.sampling.n or 1)
        yield pb.GenerateResponse(started=pb.Started(request_id=request.request_id, model="m", prompt_token_ids=[1]))
        for text in TEXTS:
            for index in outputs:
                yield pb.GenerateResponse(delta=pb.Delta(output_index=index, text=text, token_ids=[2]))
        ends = [pb.OutputEnd(finish_reason=pb.FINISH_REASON_LENGTH) for _ in outputs]
        yield pb.GenerateResponse(finished=pb.Finished(outputs=ends, usage=pb.Usage(), exact=True, attempts=1))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        inference_pb2_grpc.add_InferenceServicer_to_server(Talker(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def generate(address: str, *options: str, encoding: str = "utf-8") -> bytes:
    command = [Path(sys.executable).with_name("pdserve"), "generate", "hi", "--address", address, *options]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "TERM": "xterm", "COLUMNS": "40", "FORCE_COLOR": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert done.stderr == b""
    return done.stdout


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_models_text_comes_byte_for_byte_and_nothing_else(address: str, encoding: str) -> None:
    assert generate(address, encoding=encoding) == "".join(TEXTS).encode()


def test_each_of_several_outputs_is_named_and_comes_byte_for_byte(address: str) -> None:
    text = "".join(TEXTS)
    assert generate(address, "--n", "2") == f"[0] {text}\n[1] {text}\n".encode()


def test_json_holds_the_same_text_in_any_encoding(address: str) -> None:
    assert json.loads(generate(address, "--json", encoding="ascii"))["text"] == "".join(TEXTS)
