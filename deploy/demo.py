"""`make demo`: the main job on a laptop, in front of your eyes.

A cluster of one router, one prefill and two decode workers; a question answered; then a longer generation whose decode
worker is killed (SIGKILL) in the middle, and the proof that the client's stream did not change. Exit code 0 only if so.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from deploy import streams
from deploy.cluster import LocalCluster
from deploy.installation import child_environment
from deploy.transfer_report import TransferReport, transfer_report
from pdserve.client import Client, Delta, Result
from pdserve.config import Config
from pdserve.errors import PdserveError
from pdserve.types import Role

QUESTION = [("user", "What is the capital of France?")]
STORY = [("user", "Write a short story about a lighthouse keeper who finds a message in a bottle.")]
STORY_TOKENS = 96
KILL_AFTER_TOKENS = 24

_out = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A generation during which its decode worker was killed."""

    result: Result
    killed: str
    pid: int
    stall_ms: float


def main() -> int:
    streams.take_over()
    os.environ.update(child_environment())
    try:
        return _hold()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:  # this machine's: its disk, or who reads the output
        streams.discard()
        print(f"demo failed: {error}", file=sys.stderr)
        return 1


def _hold() -> int:
    with tempfile.TemporaryDirectory(prefix="pdserve-demo-", dir="/tmp") as runtime_dir:
        overrides = {"cluster": {"runtime_dir": runtime_dir}, "router": {"grpc_port": 0}}
        config = Config().override(overrides, "demo")
        try:
            with LocalCluster(config, lambda stage: _out.print(f"starting {stage} ...")) as cluster:
                return _show(cluster)
        except PdserveError as error:
            _out.print(f"[red]demo failed:[/red] {error}")
            return 1


def _show(cluster: LocalCluster) -> int:
    _out.print(f"\n{cluster.model} serves at {cluster.grpc_address}: {_workers(cluster)}\n")
    with Client(cluster.grpc_address) as client:
        _out.rule("a question")
        _print_prompt(QUESTION)
        answer = _stream(client, QUESTION, 64)
        _out.rule(f"a story, undisturbed ({STORY_TOKENS} tokens)")
        _print_prompt(STORY)
        undisturbed = _stream(client, STORY, STORY_TOKENS)
        transfer = transfer_report(cluster, undisturbed.request_id)
        _out.rule("the same story, its decode worker killed on the way")
        disturbed = _stream_and_kill(client, cluster)
    same = disturbed.result.token_ids == undisturbed.token_ids and disturbed.result.text == undisturbed.text
    _print_table(answer, undisturbed, transfer, disturbed, same)
    return 0 if same and disturbed.result.attempts > 1 and disturbed.result.exact else 1


def _workers(cluster: LocalCluster) -> str:
    return ", ".join(f"{worker.worker_id} (pid {worker.pid})" for worker in cluster.info().workers)


def _print_prompt(messages: list[tuple[str, str]]) -> None:
    for role, content in messages:
        _out.print(f"[bold]{role}:[/bold] {content}")


def _stream(client: Client, messages: list[tuple[str, str]], max_tokens: int) -> Result:
    stream = client.generate(messages, max_tokens=max_tokens, temperature=0)
    for delta in stream:
        _print_delta(delta)
    _out.print("\n")
    return stream.result


def _stream_and_kill(client: Client, cluster: LocalCluster) -> Disturbed:
    """Generate the story; SIGKILL the decode worker that serves it after some tokens."""
    stream = client.generate(STORY, max_tokens=STORY_TOKENS, temperature=0)
    killed, pid, received, killed_at, stall_ms = "", 0, 0, 0.0, 0.0
    for delta in stream:
        _print_delta(delta)
        received += len(delta.token_ids)
        if killed and not stall_ms:
            stall_ms = (delta.arrived_s - killed_at) * 1e3
        if not killed and received >= KILL_AFTER_TOKENS:
            killed, pid = _serving_worker(cluster)
            os.kill(pid, signal.SIGKILL)
            killed_at = delta.arrived_s
            _out.print(f"[bold red] ☠ SIGKILL {killed} (pid {pid}) [/bold red]", end="")
    _out.print("\n")
    return Disturbed(stream.result, killed, pid, stall_ms)


def _serving_worker(cluster: LocalCluster) -> tuple[str, int]:
    """The decode worker that has a request."""
    for worker in cluster.info().workers:
        if worker.role == Role.DECODE and worker.requests:
            return worker.worker_id, worker.pid
    raise PdserveError("no decode worker has a request")


def _print_delta(delta: Delta) -> None:
    _out.print(delta.text, end="", markup=False, soft_wrap=True)


def _print_table(
    answer: Result, undisturbed: Result, transfer: TransferReport, disturbed: Disturbed, same: bool
) -> None:
    table = Table("", "question", "story", "story, worker killed")
    results = (answer, undisturbed, disturbed.result)
    table.add_row("TTFT", *(f"{result.ttft_ms:.0f} ms" for result in results))
    table.add_row("TPOT", *(f"{result.tpot_ms:.1f} ms" for result in results))
    table.add_row("output tokens", *(str(result.usage.completion_tokens) for result in results))
    table.add_row("attempts", *(str(result.attempts) for result in results))
    table.add_row("KV moved", "", f"{transfer.kv_bytes / 1e6:.2f} MB", "")
    table.add_row("transfer hidden behind prefill", "", f"{transfer.hidden_share:.0%}", "")
    table.add_row("stall at the kill", "", "", f"{disturbed.stall_ms:.0f} ms")
    table.add_row(
        "equal to the undisturbed run", "", "", "[green]yes, every token[/green]" if same else "[red]NO[/red]"
    )
    _out.print(table)
    _out.print(f"killed {disturbed.killed} (pid {disturbed.pid}); the client saw one stream.")


if __name__ == "__main__":
    sys.exit(main())
