"""One good frame of each type, some more than one way, with its payload."""

from __future__ import annotations

from dataclasses import replace

from kvtransfer.frames import Abort, Ack, Commit, Credit, Frame, Gone, Have, Layer, Nack, Open, Ping
from pdserve.kv_format import KVFormat
from pdserve.types import SampledToken

ID = bytes(range(16))
LAYOUT = KVFormat(30, 3, 64, "bfloat16")
OPEN = Open(ID, 1, LAYOUT, b"weights", b"h" * 16, 32, 100, 32, 1 << 20)
LAYER = Layer(ID, 1, 29, 32, 40, spent=999, payload_bytes=16)
COMMIT = Commit(ID, 1, (SampledToken(7, -0.5, ((7, -0.5), (8, -2.0))), SampledToken(9)), payload_bytes=24)
PAYLOAD = bytes(range(16))
LIST = bytes(range(24))

FRAMES: list[tuple[Frame, bytes | None]] = [
    (OPEN, None),
    (replace(OPEN, token_start=100), None),
    (LAYER, PAYLOAD),
    (COMMIT, LIST),
    (Commit(ID, 1, (), 0), b""),
    (Ack(ID, 0), None),
    (Nack(ID, 2**32 - 1, ((0, 0, 1), (29, 5, 2**32 - 1))), None),
    (Nack(ID, 1, ()), None),
    (Credit(ID, 1, 2**64 - 1), None),
    (Abort(ID, 1, "CANCELLED", "the client went away: äöü"), None),
    (Ping(ID, 1, reply=False, spent=5), None),
    (Gone(ID, 1), None),
    (Have(ID, 2, ((3, 7, 9),)), None),
]
