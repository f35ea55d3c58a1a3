"""Faults on the wire of a build under test: there while their file is, and gone with it."""

import json

import pytest

from drills.faulty_wire import SwitchedFaults, parse_faults
from kvtransfer.frames import Ack, Layer, decode, encode
from kvtransfer.transports.base import Message
from kvtransfer.transports.faulty import Fault, FaultRule
from kvtransfer.transports.memory import MemoryNetwork
from pdserve.clock import ManualClock

ID = b"t" * 16


class Wire:
    """A switched transport that sends to a sound one."""

    def __init__(self, file):
        network = MemoryNetwork()
        self.theirs = network.transport()
        self.ours = SwitchedFaults(network.transport(), file, ManualClock())
        self.peer = self.ours.connect(self.theirs.endpoint)

    def send(self, epoch):
        """The epochs that arrive of a message with this one."""
        self.ours.send(self.peer, encode(Ack(ID, epoch)))
        events = self.theirs.receive(0.0)
        return [decode(event.parts).frame.epoch for event in events if isinstance(event, Message)]


def write(file, *rules):
    file.write_text(json.dumps({"seed": 3, "rules": rules}))


def test_nothing_happens_without_the_file(tmp_path):
    wire = Wire(tmp_path / "faults.json")
    assert [wire.send(epoch) for epoch in (1, 2, 3)] == [[1], [2], [3]]


def test_rules_strike_as_long_as_the_file_is_there(tmp_path):
    file = tmp_path / "faults.json"
    wire = Wire(file)
    assert wire.send(1) == [1]
    write(file, {"fault": "drop", "frame": "ack"})
    assert wire.send(2) == []
    file.unlink()
    assert wire.send(3) == [3]


def test_counting_begins_anew_when_the_file_changes(tmp_path):
    file = tmp_path / "faults.json"
    wire = Wire(file)
    for fault, expected in (("drop", []), ("duplicate", [1, 1])):
        write(file, {"fault": fault, "count": 1})
        assert wire.send(1) == expected
        assert wire.send(2) == [2]


def test_a_file_says_seed_and_rules():
    text = json.dumps({"seed": 3, "rules": [{"fault": "cut", "frame": "layer", "first": 9, "seconds": 12}]})
    assert parse_faults(text) == (3, (FaultRule(Fault.CUT, Layer, first=9, seconds=12),))


def test_an_unknown_fault_is_an_error():
    with pytest.raises(ValueError, match="gremlin"):
        parse_faults('{"seed": 0, "rules": [{"fault": "gremlin"}]}')
