"""The KV wire: moves the KV of one attempt from a prefill worker to a decode worker, layer by layer.

Knows bytes and layouts, not models. Pure: frames, fields, credit, ranges, integrity, sender, receiver. Shell: outgoing,
incoming, exchange, link. What carries the frames: transports.
"""
