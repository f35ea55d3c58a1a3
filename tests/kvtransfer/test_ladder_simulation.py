"""Several transfers at once under a seeded network and a virtual clock, with workers' controls and the ladder in the
loop: whatever dies, every request whose decode worker lives ends with the right KV, and nothing is left."""

from __future__ import annotations

from collections import Counter

from pdserve.errors import Cancelled
from pdserve.types import Finish
from support.kv_cluster import CONFIG, TOKEN, Request, SimulatedCluster
from support.kv_simulation import NetworkFaults
from support.seeds import Seeds

CALM = NetworkFaults()
ROUGH = NetworkFaults(drop=0.08, double=0.08, corrupt=0.04, min_delay_s=0.001, max_delay_s=0.03)
TIMES_OUT_AT_S = 100.0
REQUESTS = 4


def started(seed: int, prefill: int = 3, decode: int = 2) -> tuple[SimulatedCluster, list[Request]]:
    """A cluster with requests that come within four seconds, more than its pools hold at once."""
    cluster = SimulatedCluster(seed, CALM if seed % 2 else ROUGH, prefill, decode)
    rng = cluster.rng
    requests = [cluster.request_at(rng.uniform(0.0, 4.0), rng.choice((1, 31, 32, 70))) for _ in range(REQUESTS)]
    return cluster, requests


def run_to_the_end(cluster: SimulatedCluster) -> None:
    """Let it happen; then check what must hold whatever has."""
    cluster.simulation.run(until_s=TIMES_OUT_AT_S)
    assert cluster.simulation.network.overspent == 0
    for node in cluster.nodes:
        assert all(store.late_accesses == store.early_reads == 0 for store in node.engine.stores)
        stats = node.link.stats()
        assert stats.internal_errors == 0
        if node.alive:
            assert (stats.outgoing, stats.incoming) == (0, 0), "a transfer is left"
            assert node.engine.free_tokens == node.engine.pool_tokens, "a lease is left"
            assert not node.engine.sequences
            assert not node.control.owners
    for request in cluster.requests.values():
        check_end(request)


def check_end(request: Request) -> None:
    if not request.decode.alive:
        return
    (outcome,) = request.outcomes
    if request.aborted and isinstance(outcome, Cancelled):
        return
    assert isinstance(outcome, Finish), outcome
    assert request.tokens == [TOKEN]


def test_senders_that_die_at_any_moment_cost_no_request_anything(seeds: Seeds) -> None:
    rungs: Counter[str] = Counter()
    for seed in seeds(120):
        cluster, _ = started(seed)
        for node in cluster.prefill[: cluster.rng.choice((1, 2, 2, 3))]:
            cluster.kill_at(cluster.rng.uniform(0.0, 6.0), node)
        run_to_the_end(cluster)
        rungs += cluster.rungs
    if seeds.all:
        assert rungs["another sender"] > 20
        assert rungs["local"] > 10


def test_without_a_prefill_worker_from_the_start_everything_is_computed_locally(seeds: Seeds) -> None:
    for seed in seeds(20):
        cluster, requests = started(seed, prefill=1)
        cluster.kill_at(0.0, cluster.prefill[0])
        run_to_the_end(cluster)
        assert cluster.rungs["local"] == len(requests)


def test_decode_workers_that_die_leave_nothing_at_the_senders(seeds: Seeds) -> None:
    for seed in seeds(40):
        cluster, _ = started(seed)
        cluster.kill_at(cluster.rng.uniform(0.0, 5.0), cluster.decode[0])
        if seed % 3 == 0:
            cluster.kill_at(cluster.rng.uniform(0.0, 5.0), cluster.prefill[0])
        run_to_the_end(cluster)


def test_aborts_at_any_moment_beside_dying_senders_leave_nothing(seeds: Seeds) -> None:
    for seed in seeds(60):
        cluster, requests = started(seed)
        cluster.kill_at(cluster.rng.uniform(0.0, 5.0), cluster.prefill[0])
        for request in requests[:2]:
            cluster.abort_at(cluster.rng.uniform(0.0, 5.0), request)
        run_to_the_end(cluster)


def test_calm_cluster_takes_no_rung_and_computes_nothing_twice(seeds: Seeds) -> None:
    for seed in seeds(20):
        cluster, requests = started(2 * seed + 1)
        run_to_the_end(cluster)
        assert not +cluster.rungs
        assert sum(node.engine.received for node in cluster.decode) == sum(len(r.token_ids) for r in requests)
    assert CONFIG.max_renewals > 0
