"""Who is alive, by the clock that the test owns."""

from pdserve.types import Load, ModelLimits, Role, WorkerInfo
from router.membership import Membership


def worker(worker_id="decode-0", incarnation="a", role=Role.DECODE):
    return WorkerInfo(worker_id, incarnation, role, 1, "host", "ipc://x", "print", "m", ModelLimits(10, 100, 100))


def test_a_worker_that_stops_renewing_expires_once():
    members = Membership(timeout_s=1.5)
    members.join(worker(), now=0.0)
    members.renew("a", Load(), now=1.0)
    assert members.expire(now=2.4) == []
    assert members.expire(now=2.6) == ["a"]
    assert members.expire(now=2.7) == []
    assert "a" not in members
    assert [info.worker_id for info in members.lost] == ["decode-0"]


def test_a_new_incarnation_replaces_the_old_one():
    members = Membership(timeout_s=1.5)
    members.join(worker(incarnation="a"), now=0.0)
    assert members.join(worker(incarnation="b"), now=1.0) == ["a"]
    assert "a" not in members
    assert "b" in members
    assert members.lost == []


def test_a_late_renewal_of_a_lost_worker_changes_nothing():
    members = Membership(timeout_s=1.5)
    members.join(worker(), now=0.0)
    assert members.leave("a")
    members.renew("a", Load(queued=3), now=0.1)
    assert "a" not in members
    assert not members.leave("a")


def test_lost_workers_are_remembered_within_a_limit():
    members = Membership(timeout_s=1.5)
    for number in range(1000):
        members.join(worker(f"decode-{number}", str(number)), now=0.0)
        members.leave(str(number))
    assert len(members.lost) == 64
