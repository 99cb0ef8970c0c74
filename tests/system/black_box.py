"""The real mesh as a black box: `services.up` as a child process, real NATS, real UCX."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai

SMOLLM2 = "smollm2-135m-instruct"
START_TIMEOUT_SECONDS = 180.0


def _free_port() -> int:
    """None of those that the system gives away, if it leaves any: the mesh takes many of them before its
    gateway binds."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = range(10_000, 1 << 16)
    kept = [port for port in ports if not first <= port <= last] or ports
    for port in random.sample(kept, min(100, len(kept))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def until(happened: Callable[[], Any], *, timeout_seconds: float, what: str) -> Any:
    """Ask a black box again and again until it says yes; fail with `what` at the deadline."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        if answer := happened():
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_seconds} s: {what}")
        time.sleep(0.05)


def child_of(parent: int, program: str) -> int:
    """The process id of the child of `parent` that runs `program`."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        if fields.get("PPid") == str(parent) and fields.get("Name", "").startswith(program):
            return int(fields["Pid"])
    raise AssertionError(f"{parent} has no child {program}")


def _metric(service: dict[str, Any], stem: str, labels: dict[str, str]) -> float:
    total = 0.0
    with urllib.request.urlopen(service["http_address"] + "/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    for line in lines:
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name == stem and all(f'{key}="{value}"' in rest for key, value in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


class Mesh:
    """A running `up` and what a test asks of it."""

    def __init__(self, state_dir: Path, *flags: str, model: str = SMOLLM2, api_key: str = "none") -> None:
        self.port = _free_port()
        self.source, self.model = model, Path(model).name
        """A name or path, and what requests call it."""
        self.api_key = api_key
        self.url = f"http://127.0.0.1:{self.port}"
        self.state_dir = state_dir
        self.output = state_dir / "up.txt"
        self._clients: list[openai.OpenAI] = []
        command = [
            sys.executable,
            "-m",
            "services.up",
            "--port",
            str(self.port),
            "--state-dir",
            str(state_dir),
            "--model",
            model,
        ]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen([*command, *flags], stdout=output, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"up ended with {self.process.returncode}:\n{self.output.read_text()}")
            return self.status_of("/ready") == 200

        until(
            ready,
            timeout_seconds=START_TIMEOUT_SECONDS,
            what=f"the mesh is ready; it said {self.output.read_text()}",
        )

    def status_of(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def services(self) -> list[dict[str, Any]]:
        headers = {"authorization": f"Bearer {self.api_key}"}
        asked = urllib.request.Request(self.url + "/v1/mesh", headers=headers)
        with urllib.request.urlopen(asked, timeout=5) as response:
            return list(json.load(response)["services"])

    def service(self, name: str) -> dict[str, Any]:
        return next(s for s in self.services() if s["name"] == name)

    def gauges(self) -> dict[str, int]:
        """Everything that requests hold, summed by worker; all zero when nothing is served."""
        held: dict[str, int] = {}
        for service in self.services():
            if service["kind"] not in ("prefill_worker", "decode_worker"):
                continue  # blocks of the store are its content, held for nobody
            load = service.get("load") or {}
            for gauge in ("num_used_blocks", "num_running", "num_waiting", "num_reserved"):
                held[f"{service['name']}.{gauge}"] = load.get(gauge, 0)
        with urllib.request.urlopen(self.url + "/metrics", timeout=5) as response:
            metrics = response.read().decode()
        for stem in ("kvmesh_num_requests_running", "kvmesh_num_requests_waiting"):
            values = re.findall(rf"^{stem}(?:{{[^}}]*}})? ([0-9.e+-]+)$", metrics, re.MULTILINE)
            held[f"gateway.{stem}"] = int(sum(float(value) for value in values))
        return held

    def metric_sum(self, stem: str, **labels: str) -> float:
        """The samples of this name with at least these labels, summed over all services."""
        asked = [s for s in self.services() if s["state"] == "ready" and s.get("http_address")]
        return sum(_metric(service, stem, labels) for service in asked)

    def metric_of(self, name: str, stem: str, **labels: str) -> float:
        """The same of one service."""
        return _metric(self.service(name), stem, labels)

    def wait_idle(self, timeout_seconds: float = 30.0) -> None:
        until(
            lambda: not any(self.gauges().values()),
            timeout_seconds=timeout_seconds,
            what="all gauges are at zero",
        )

    def kill(self, name: str) -> str:
        """kill -9 the service of this name; returns the incarnation that died."""
        victim = self.service(name)
        os.kill(victim["pid"], signal.SIGKILL)
        return str(victim["incarnation"])

    def wait_restarted(self, name: str, old_incarnation: str, timeout_seconds: float = 90.0) -> None:
        def back() -> bool:
            found = [s for s in self.services() if s["name"] == name and s["incarnation"] != old_incarnation]
            return any(s["state"] == "ready" for s in found)

        until(back, timeout_seconds=timeout_seconds, what=f"{name} serves again as a new incarnation")

    def client(self) -> openai.OpenAI:
        client = openai.OpenAI(base_url=self.url + "/v1", api_key=self.api_key, max_retries=0, timeout=120)
        self._clients.append(client)
        return client

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=self.api_key, max_retries=0, timeout=120)

    def stop(self) -> int:
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=10)
            raise


def running_mesh(state_dir: Path, *flags: str, model: str = SMOLLM2, api_key: str = "none") -> Iterator[Mesh]:
    """A mesh that is ready, and ends well afterwards."""
    mesh = Mesh(state_dir, *flags, model=model, api_key=api_key)
    try:
        mesh.wait_ready()
        yield mesh
    finally:
        code = mesh.stop()
    assert code == 0, f"up ended with {code} after Ctrl-C:\n{mesh.output.read_text()}"
