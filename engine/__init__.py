"""What prefill and decode workers share: blocks, scheduling and the step loop, above the executor port.

Nothing here knows tensors, bytes, sockets or processes: what computes is behind `engine.executor`.
"""
