"""A whole cluster in one thread, under a virtual clock, with a seed for everything that chance decides.

The product's own code runs: attempt loop, membership, policies, sessions' messages, engine, scheduler, block pool, both
services, link, sender, receiver, ladder. Only sockets, threads, time and tensors are others. A seed is a whole run.
"""

from simulation.runner import Outcome, Report, run, simulate

__all__ = ["Outcome", "Report", "run", "simulate"]
