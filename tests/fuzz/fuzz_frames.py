"""A coverage-guided run over the wire's decoder, for scripts/fuzz: any bytes give a frame or a FrameError.

An input is a header, then, behind its length, a payload. As no fuzzer finds a checksum, each header is tried as it is
and sealed; a sealed header's payload checksum is not looked at, so that what comes after it is reached.
"""

from __future__ import annotations

import struct
import sys

import atheris
from xxhash import xxh3_64_intdigest

with atheris.instrument_imports(include=["kvtransfer", "pdserve"]):
    from kvtransfer.frames import BadPayload, Commit, FrameError, Layer, decode, encode

_LENGTH = struct.Struct("<H")


def check(data: bytes) -> None:
    length = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0
    header, payload = data[_LENGTH.size :][:length], data[_LENGTH.size + length :]
    sealed = struct.pack("<Q", xxh3_64_intdigest(header)) + header
    for parts in ([header], [sealed], [header, payload], [sealed, payload]):
        try:
            received = decode(parts, checked=False)
        except BadPayload:
            raise AssertionError("a payload was checked") from None
        except FrameError:
            continue
        body = received.payload if isinstance(received.frame, Layer | Commit) else None
        if decode(encode(received.frame, body)).frame != received.frame:
            raise AssertionError(f"{received.frame} is another one after a way over the wire")


if __name__ == "__main__":
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
