"""The pool over HTTP: many clients' programs on this machine's slots.

  python -m tools_sandbox.service.server [--backend=jail] [--allow-weaker] [--slots=N]
    [--port=8080] [--host=0.0.0.0 --token_file=FILE]

Routes and statuses are in `app`; guarantees are in README.md. The server listens once
every slot has run a program. On SIGTERM or Ctrl-C, the server accepts no more, refuses
waiting requests (503: ask another replica), lets running ones end, and exits with 0.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import socket
import sys
from collections.abc import Sequence

from tools_sandbox import http_server
from tools_sandbox.host import pool
from tools_sandbox.http_client import read_key
from tools_sandbox.jail import keeper as jail
from tools_sandbox.jail.wire import Verdict
from tools_sandbox.service.app import ServiceConfig, make_app
from tools_sandbox.service.run_queue import RunQueue

PORT = 8080  # SandboxFusion's
# Seconds beyond the longest run: to kill the program and to send the answer.
DRAIN_S = 15
_LOST = (
  "back-end subprocess has no wall against hostile programs. Lost, compared with jail: "
  "the network is open to them; so is every file and process of this user, other runs "
  "and this server included; disk space is not limited. See tools_sandbox/README.md"
)


def make_parser() -> argparse.ArgumentParser:
  """Makes the argument parser."""
  config = ServiceConfig()
  parser = argparse.ArgumentParser(
    prog="python -m tools_sandbox.service.server",
    description="Runs Python programs for HTTP clients.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = parser.add_argument
  add("--backend", choices=pool.BACKENDS, default="jail", help="see README.md")
  add(
    "--allow-weaker",
    action="store_true",
    help="takes back-end subprocess where this machine cannot build jails",
  )
  add("--slots", type=int, default=os.cpu_count(), help="programs that run at once")
  add("--host", default="127.0.0.1", help="beyond loopback a token is needed")
  add("--port", type=int, default=PORT, help="0 for any that is free")
  add("--token_file", help="a file with the word that requests must bear")
  add("--max_waiting", type=int, default=256, help="requests without a slot")
  add("--max_wait_s", type=float, default=config.wait_s, help="without a deadline")
  add("--max_timeout_s", type=float, default=config.most.wall_s, help="of a run")
  add("--max_memory_mb", type=int, default=config.most.memory_mb, help="of a run")
  add("--max_lease_s", type=float, default=config.lease_s, help="of a session")
  add("--max_body_mb", type=int, default=config.max_body >> 20, help="of a request")
  return parser


class _Server(http_server.Server):
  """Drains the queue before stopping."""

  def __init__(self, queue: RunQueue, config: ServiceConfig):
    grace_s = int(config.most.wall_s) + DRAIN_S
    super().__init__(make_app(queue, config), grace_s)
    self._queue = queue

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    self._queue.drain()
    await super().shutdown(sockets)


def warm_up(sandbox: pool.SandboxPool, slots: int) -> None:
  """Starts every slot's zygote, all at once, and runs an empty program on each.

  Raises:
    ValueError: a slot cannot run the program; the message says why.
  """
  with concurrent.futures.ThreadPoolExecutor(slots) as threads:
    for result in threads.map(lambda _: sandbox.run(""), range(slots)):
      if result.verdict != Verdict.OK:
        raise ValueError(f"a slot does not run programs: {result.stderr.strip()}")


def serve(args: argparse.Namespace) -> None:
  """Serves until a signal ends it.

  Raises:
    ValueError, RuntimeError: an argument cannot be used, or this machine cannot build
      jails; the message says how to fix it.
  """
  # --- Who can reach the server, and which walls there are.
  if args.host not in http_server.LOOPBACK and args.token_file is None:
    raise ValueError(f"--host={args.host} needs --token_file: anybody could run code")
  if args.backend == "jail" and args.allow_weaker and (missing := jail.check()):
    print(f"no jail: {'; '.join(missing)}", file=sys.stderr)
    args.backend = "subprocess"
  if args.backend == "subprocess":
    print(_LOST, file=sys.stderr, flush=True)

  # --- The request limits.
  base = ServiceConfig()
  most = {"wall_s": args.max_timeout_s, "cpu_s": args.max_timeout_s}
  config = ServiceConfig(
    token=read_key(args.token_file, "--token_file"),
    most=dataclasses.replace(base.most, **most, memory_mb=args.max_memory_mb),
    wait_s=args.max_wait_s,
    max_body=args.max_body_mb << 20,
    lease_s=args.max_lease_s,
  )

  # --- Serve: the address first, so that a port in use fails before slots start.
  with (
    http_server.bind(args.host, args.port) as sock,
    pool.SandboxPool(args.slots, backend=args.backend) as sandbox,
  ):
    queue = RunQueue(sandbox, args.slots, args.max_waiting)
    server = _Server(queue, config)
    warm_up(sandbox, args.slots)
    # Listen only after every slot has run a program: each client is served at once.
    url = http_server.listen(sock, args.host)
    print(f"{args.slots} slots of back-end {args.backend} at {url}", flush=True)
    server.run(sockets=[sock])


def main(argv: Sequence[str] | None = None) -> None:
  """Reads the arguments and serves."""
  http_server.run_program(make_parser(), serve, argv)


if __name__ == "__main__":
  main()
