"""What a client tells the router at which its stream goes on."""

from __future__ import annotations

from pdserve.client.resume import resumption
from pdserve.client.stream import StreamFold
from pdserve.rpc import inference_pb2 as pb


def test_the_next_router_is_told_how_the_outputs_stood_at_the_last_one() -> None:
    fold = StreamFold(0.0)
    before = pb.ResumeState(prompt_fingerprint="a", output_fingerprint="b")
    after = pb.ResumeState(prompt_fingerprint="a", output_fingerprint="b", crashes=1, crashed_at=2)
    other = pb.ResumeState(output_index=1, inexact=True)
    fold.accept(pb.GenerateResponse(started=pb.Started(request_id="r", prompt_token_ids=[7])), 0.0)
    for state in (before, other, after):
        fold.accept(pb.GenerateResponse(resume_state=state), 0.0)
    fold.accept(pb.GenerateResponse(delta=pb.Delta(token_ids=[5, 6])), 0.0)
    again = resumption(pb.GenerateRequest(request_id="r"), fold)
    assert list(again.resume.states) == [after, other]
    assert [list(output.ids) for output in again.resume.outputs] == [[5, 6]]


def test_text_held_back_to_an_outputs_end_is_taken_once_for_each_output() -> None:
    fold = StreamFold(0.0)

    def accept(**fields: object) -> bool:
        return fold.accept(pb.GenerateResponse(delta=pb.Delta(**fields)), 0.0) is not None

    fold.accept(pb.GenerateResponse(started=pb.Started(request_id="r", prompt_token_ids=[7])), 0.0)
    assert accept(token_ids=[5], text="a")
    assert accept(text="b")
    fold.resume()
    fold.accept(pb.GenerateResponse(started=pb.Started(request_id="r", prompt_token_ids=[7])), 0.0)
    assert not accept(text="b")
    assert accept(output_index=1, token_ids=[5])
    assert accept(output_index=1, text="b")
