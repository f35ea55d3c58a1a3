"""The hand-off is layer-wise and overlapped with the computation, by the trace of both sides. A wire that does not
overlap fails every try."""

import pytest

from deploy.transfer_report import transfer_report
from support.clusters import Missed, aimed, trace_of

pytestmark = pytest.mark.cluster


@aimed
def test_the_last_chunks_first_layer_arrives_before_its_last_layer_is_computed(cluster, client):
    prompt = list(range(2000, 3024))
    result = client.complete(prompt, temperature=0, max_tokens=2, ignore_eos=True)
    events = [event for worker in cluster.worker_ids for event in trace_of(cluster, worker)]
    transfer = next(
        event.fields["transfer"]
        for event in events
        if event.name == "prefill_computed" and event.fields["request_id"] == result.request_id
    )
    mine = [event for event in events if event.fields.get("transfer") == transfer]
    computed = [event for event in mine if event.name == "layer_computed"]
    received = [event for event in mine if event.name == "frame_received"]
    last_layer = max(event.fields["layer"] for event in computed)
    last_chunk = max(event.fields["start"] for event in computed)
    assert (last_layer, last_chunk) == (3, 768)
    first_layer_arrived = max(
        event.time_ns for event in received if event.fields["layer"] == 0 and event.fields["stop"] > last_chunk
    )
    (last_layer_computed,) = [
        event.time_ns
        for event in computed
        if (event.fields["layer"], event.fields["start"]) == (last_layer, last_chunk)
    ]
    if first_layer_arrived >= last_layer_computed:
        raise Missed("its receiver was away for as long as the computing took")
    report = transfer_report(cluster, result.request_id)
    values = 1024 * 4 * 2 * 2 * 32  # tokens, layers, K and V, KV heads, head size
    assert report.kv_bytes in (2 * values, 4 * values)  # bfloat16 or float32
    print(f"\nhidden {report.hidden_share:.1%}, visible {report.visible_ms:.2f} ms, {report.frame_count} frames")
