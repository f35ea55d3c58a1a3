"""Failover drills: put a load on a cluster, inject a fault, and give a verdict.

    load      seeded requests, and a recording of what came back
    arena     the cluster a drill happens on: one of its own, or the user's
    faults    kills, freezes and the like, each at a phase it names
    stage     one drill's course: undisturbed reference, disturbed rounds, and the evidence they leave
    catalogue the drills: workers, control, storms, wire, nodes, partition
    verdict   evidence in, PASS or FAIL with reasons out; pure
    footprint what processes take over time
    timeline  the picture of it
    run       one drill or all, start to end

A drill sees the cluster as its clients and operators do: over gRPC, in its logs and traces, through signals to its
processes.
"""
