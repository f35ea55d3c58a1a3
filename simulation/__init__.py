"""A whole cluster in one thread, under a virtual clock, with a seed for everything that chance decides.

The product's own code runs: the router's control with attempt loop, membership and policies; the worker's with both
roles; both ends of a session; engine, scheduler, block pool, link, sender, receiver. Only sockets, threads, time and
tensors are others. A seed is a whole run.
"""

from simulation.runner import Outcome, Report, run, simulate

__all__ = ["Outcome", "Report", "run", "simulate"]
