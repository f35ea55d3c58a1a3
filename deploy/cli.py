"""The pdserve command.

Exit codes: 0 done, 1 it failed (the cluster, a request, or nobody reads the output any more), 2 a setting or argument
is wrong, 130 Ctrl-C, 129 and 143 SIGHUP and SIGTERM while a cluster starts. One clear line each time. Output goes to
stdout, all else to stderr; with --json stdout has JSON only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from deploy import streams
from deploy.commands import bench, drill
from deploy.installation import child_environment
from deploy.processes import end_processes, processes_of, terminate
from deploy.runtime import ClusterState, RuntimeDirectory
from deploy.termination import STOP_SIGNALS, exit_on_signals
from pdserve import logs
from pdserve.client import Client, Result
from pdserve.client.channel import address_list
from pdserve.config import TRANSFER_MODES, Config, load_config
from pdserve.errors import ConfigError, DeadlineExceeded, InvalidArgument, PdserveError, Unavailable
from pdserve.rpc.inference_pb2 import ServerInfo

if TYPE_CHECKING:  # the commands of a client do without
    from worker.spec import UnderTest

app = typer.Typer(
    help="Serve large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.add_typer(drill.app, name="drill")
_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False, soft_wrap=True)
_STOP_TIMEOUT_S = 30.0  # for the process that runs the cluster to stop it
_DRAIN_LOOK_S = 0.1  # a router tells nobody that a worker is drained: it is asked

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file; flags override it.")]
AddressOption = Annotated[
    str, typer.Option("--address", help="host:port of each router, commas between. Default: the local cluster's.")
]
RuntimeOption = Annotated[str, typer.Option("--runtime-dir", help="Where the local cluster keeps its state.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def main() -> None:
    """Entry point: runs the command and turns errors into one line and an exit code."""
    streams.take_over()
    os.environ.update(child_environment())
    code = run(sys.argv[1:])
    sys.exit(code if streams.finish() else code or 1)


def run(arguments: Sequence[str]) -> int:
    """Run a command; its exit code."""
    try:
        app(arguments)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ConfigError, InvalidArgument) as error:
        return _failed(error, 2)
    except (PdserveError, OSError) as error:  # of OSError: this machine's disk, descriptors, memory
        return _failed(error, 1)
    return 0


@app.command()
def up(
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    routers: Annotated[int | None, typer.Option(help="Routers, at successive ports.")] = None,
    model: Annotated[str | None, typer.Option(help="A Hugging Face directory. Default: the embedded model.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each worker; 0: cores shared out.")] = None,
    transfer: Annotated[str | None, typer.Option(help=f"When KV is sent: {', '.join(TRANSFER_MODES)}.")] = None,
    port: Annotated[int | None, typer.Option(help="The router's gRPC port; 0: any free one.")] = None,
    config: ConfigOption = None,
    runtime_dir: RuntimeOption = "",
    detach: Annotated[bool, typer.Option(help="Return when the cluster answers its health check.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Start a cluster on this machine and run it until Ctrl-C."""
    flags = {
        "cluster": {"prefill": prefill, "decode": decode, "routers": routers, "runtime_dir": runtime_dir or None},
        "engine": {"threads": threads},
        "model": {"path": model},
        "transfer": {"mode": transfer},
        "router": {"grpc_port": port},
    }
    settings = _config(config, flags)
    if detach:
        _start_detached(settings, sys.argv[1:], json_output)
    else:
        run_cluster(settings, json_output)


@app.command()
def down(config: ConfigOption = None, runtime_dir: RuntimeOption = "") -> None:
    """Stop the cluster on this machine. Leaves no process, Ray session or shared memory behind."""
    runtime = _runtime(config, runtime_dir)
    runtime.check_own()
    cluster_id, supervisor = runtime.cluster_id, runtime.supervisor()
    if not cluster_id:
        _err.print("no cluster runs here")
        return
    if supervisor is not None:
        terminate([supervisor])
        psutil.wait_procs([supervisor], timeout=_STOP_TIMEOUT_S)
        if runtime.supervisor() is not None:
            supervisor.kill()
    end_processes(cluster_id, lambda: terminate(processes_of(cluster_id)))
    runtime.remove(cluster_id)
    _err.print("the cluster is down")


@app.command()
def status(
    address: AddressOption = "",
    config: ConfigOption = None,
    runtime_dir: RuntimeOption = "",
    json_output: JsonOption = False,
) -> None:
    """Show the router's addresses and each worker."""
    routers = _addresses(address, config, runtime_dir)
    with Client(routers) as client:
        info = client.server_info()
    _report(info, routers, json_output)


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="A worker's id, as `pdserve status` shows it.")],
    cancel: Annotated[bool, typer.Option("--cancel", help="Let it work on as before.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until it has finished what it had.")] = 60.0,
    address: AddressOption = "",
    config: ConfigOption = None,
    runtime_dir: RuntimeOption = "",
) -> None:
    """Let a worker finish what it has and give it nothing new; returns when nothing is left there."""
    with Client(_addresses(address, config, runtime_dir)) as client:
        client.drain_worker(worker, cancel=cancel)
        if cancel:
            _err.print(f"{worker} works on")
            return
        _wait_drained(client, worker, timeout)
    _err.print(f"{worker} is drained: it can be stopped, or set to work again with --cancel")


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="The prompt, or with --chat the user's message.")],
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="At most so many tokens. Default: what fits.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="Default: derived from the request id.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="How many outputs; the prompt is computed once.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until the request is given up.")] = 600.0,
    address: AddressOption = "",
    config: ConfigOption = None,
    runtime_dir: RuntimeOption = "",
    json_output: JsonOption = False,
) -> None:
    """Stream an answer from the running cluster. The model's text goes to stdout byte for byte, in UTF-8."""
    prompt = [("user", text)] if chat else text
    with Client(_addresses(address, config, runtime_dir)) as client:
        stream = client.generate(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop,
            n=n,
            timeout_s=timeout,
        )
        several = (n or 1) > 1  # they come interleaved: printed when they have ended
        for delta in stream:
            if not json_output and not several:
                _write_text(delta.text)
    if json_output:
        print(json.dumps(_result_object(stream.result), indent=2))
    elif several:
        for index, output in enumerate(stream.result.outputs):
            _write_text(f"[{index}] {output.text}\n")
    elif sys.stdout.isatty():
        _write_text("\n")


def _write_text(text: str) -> None:
    """The model's text is data, so nothing renders it: no tab, control character or `:smile:` of it changes. It is
    UTF-8 whatever stdout's encoding is, and whoever reads a pipe or a file has that and no more."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _config(path: Path | None, flags: dict[str, dict[str, Any]]) -> Config:
    """Defaults, then the file, then the flags that were given."""
    config = load_config(path) if path else Config()
    given = {
        section: {key: value for key, value in keys.items() if value is not None} for section, keys in flags.items()
    }
    return config.override(given, "command line")


def _absolute(config: Config) -> Config:
    """Paths that stay what they are when the working directory is another one."""
    path = os.path.abspath(os.path.expanduser(config.model.path)) if config.model.path else ""
    runtime_dir = os.path.abspath(config.cluster.runtime_dir) if config.cluster.runtime_dir else ""
    return replace(
        config,
        model=replace(config.model, path=path),
        cluster=replace(config.cluster, runtime_dir=runtime_dir),
    )


def _runtime(path: Path | None, runtime_dir: str) -> RuntimeDirectory:
    config = _config(path, {"cluster": {"runtime_dir": runtime_dir or None}})
    return RuntimeDirectory(config.cluster.runtime_dir)


def _addresses(address: str, path: Path | None, runtime_dir: str) -> list[str]:
    if address:
        return list(address_list(address))
    runtime = _runtime(path, runtime_dir)
    state = runtime.read_state()
    if state is None:
        if runtime.supervisor() is not None:
            raise Unavailable(f"the cluster in {runtime.path} is starting; try again when it serves")
        raise Unavailable(
            f"no cluster runs in {runtime.path}: start one with `pdserve up`, "
            "or name one with --runtime-dir or --address"
        )
    return state.routers


def _wait_drained(client: Client, worker_id: str, timeout_s: float) -> None:
    """Look until the worker says that it drains and has nothing left, or is gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        worker = next((each for each in client.server_info().workers if each.worker_id == worker_id), None)
        busy = worker is not None and (worker.requests or worker.queue or worker.blocks.leased)
        if worker is None or worker.state == "lost" or (worker.state == "draining" and not busy):
            return
        time.sleep(_DRAIN_LOOK_S)
    raise DeadlineExceeded(f"{worker_id} has still requests after {timeout_s:g} s; it goes on draining")


def run_cluster(config: Config, json_output: bool, under_test: UnderTest | None = None) -> None:
    """Run a cluster in this process until it is told to end."""
    from deploy.cluster import LocalCluster

    config = _absolute(config)
    logs.configure(config.logging.level, "up")
    with streams.libraries_silent() as own:
        out = Console(file=own, highlight=False, quiet=json_output)

        def progress(stage: str) -> None:
            exit_on_signals()  # at every stage, because Ray puts its own handler in place when it starts
            out.print(f"starting {stage} ...")

        _print_config(config, out)
        begin = time.monotonic()
        os.chdir("/")  # the directory in which it was started is the user's to remove
        with LocalCluster(config, progress, under_test) as cluster:
            info = cluster.info()
            stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in cluster.stage_seconds.items())
            took = f"after {time.monotonic() - begin:.1f} s ({stages})"
            out.print(f"{cluster.model} serves at {', '.join(cluster.grpc_addresses)} {took}")
            _report(info, cluster.grpc_addresses, json_output, out)
            out.print("Ctrl-C stops it")
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                threading.Event().wait()
            out.print("stopping ...")
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def _print_config(config: Config, out: Console) -> None:
    out.print(f"config: {json.dumps(config.as_dict())}", markup=False, soft_wrap=True)


def _start_detached(config: Config, arguments: list[str], json_output: bool) -> None:
    """Run the same command without --detach in a session of its own, and wait for its health check."""
    runtime = RuntimeDirectory(config.cluster.runtime_dir)
    exit_on_signals()
    if not json_output:
        _print_config(config, _out)
    command = [sys.executable, "-P", "-m", "deploy", *(a for a in arguments if a != "--detach")]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            state = _wait_healthy(process, runtime, config.cluster.start_timeout_s + 30.0)
        except BaseException:  # a signal too: nobody would know of the cluster
            process.terminate()
            raise
        if state is None:
            output.seek(0)
            _err.print(output.read().decode(errors="replace").strip(), markup=False)
            raise typer.Exit(process.returncode or 1)
    with Client(state.routers) as client:
        _report(client.server_info(), state.routers, json_output)


def _wait_healthy(process: subprocess.Popen[bytes], runtime: RuntimeDirectory, timeout_s: float) -> ClusterState | None:
    """What the cluster's state file says once it is healthy; None if the process ended before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            process.wait(timeout=0.1)
            return None
        except subprocess.TimeoutExpired:
            state = runtime.read_state()
        if state is not None and state.pid == process.pid:
            with Client(state.grpc) as client:
                if client.healthy():
                    return state
    raise Unavailable(f"the cluster did not start within {timeout_s:g} s; its logs are in {runtime.logs}")


def _report(info: ServerInfo, routers: list[str], json_output: bool, out: Console = _out) -> None:
    """`routers`: the addresses of all; `info` is what one of them says."""
    if json_output:
        streams.print_json(_status_object(info, routers), file=out.file)
    else:
        _print_status(info, routers, out)


def _status_object(info: ServerInfo, routers: list[str]) -> dict[str, Any]:
    return {
        "grpc": info.grpc_address,
        "routers": routers,
        "sessions": info.session_address,
        "router_pid": info.pid,
        "model": info.model,
        "version": info.version,
        "running_requests": info.running_requests,
        "workers": [
            {
                "worker_id": worker.worker_id,
                "role": worker.role,
                "pid": worker.pid,
                "state": worker.state,
                "queue": worker.queue,
                "requests": worker.requests,
                "blocks": {"free": worker.blocks.free, "cached": worker.blocks.cached, "leased": worker.blocks.leased},
                "fingerprint": worker.fingerprint,
            }
            for worker in info.workers
        ],
    }


def _print_status(info: ServerInfo, routers: list[str], out: Console) -> None:
    out.print(f"model {info.model}  grpc {', '.join(routers)}  sessions {info.session_address}", soft_wrap=True)
    headings = ("worker", "role", "pid", "state", "queue", "requests", "free", "cached", "leased")
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for worker in info.workers:
        counts = (worker.pid, worker.state, worker.queue, worker.requests)
        blocks = (worker.blocks.free, worker.blocks.cached, worker.blocks.leased)
        table.add_row(worker.worker_id, worker.role, *(str(value) for value in (*counts, *blocks)))
    out.print(table)


def _result_object(result: Result) -> dict[str, Any]:
    usage = {**asdict(result.usage), "total_tokens": result.usage.total_tokens}
    return {
        "request_id": result.request_id,
        "model": result.model,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason.value,
        "stop": result.stop,
        "outputs": [
            {"text": each.text, "token_ids": list(each.token_ids), "finish_reason": each.finish_reason.value}
            for each in result.outputs
        ],
        "usage": usage,
        "seed": result.seed,
        "ttft_ms": result.ttft_ms,
        "tpot_ms": result.tpot_ms,
        "attempts": result.attempts,
        "exact": result.exact,
    }


def _failed(error: Exception, code: int) -> int:
    with contextlib.suppress(OSError):
        _err.print(f"pdserve: {error}", markup=False)
    return code
