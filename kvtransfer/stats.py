"""What a link has counted since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LinkStats:
    """Counts only grow, but for the two gauges. The link's thread writes its own; readers get copies."""

    outgoing: int = 0  # gauge: transfers being sent
    incoming: int = 0  # gauge: transfers being expected or received
    frames_sent: int = 0
    bytes_sent: int = 0  # of payload
    frames_received: int = 0
    bytes_received: int = 0
    frames_resent: int = 0  # LAYER frames sent again because the receiver asked
    bytes_resent: int = 0
    frames_refused: int = 0  # not a frame, of another epoch, or not allowed in the transfer's state
    checksum_failures: int = 0  # payloads that came damaged
    integrity_failures: int = 0  # stored blocks that differed from COMMIT's list
    peers_lost: int = 0  # times messages were dropped because a peer was not there
    transfers_failed: int = 0
    internal_errors: int = 0  # exceptions that should not be
