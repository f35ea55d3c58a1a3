"""Benchmarks are commands, not tests: each measures ratios in one run, against the machine's own limits or a peer."""
