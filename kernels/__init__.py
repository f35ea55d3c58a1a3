"""The operations of a decoder and their numeric contract, behind one table chosen once at start.

`kernels.ops` states the table; `kernels.reference` is the plain torch implementation, the oracle.
"""
