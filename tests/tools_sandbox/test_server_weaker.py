"""The service takes the weaker back-end only where it is told to, and says so."""

from __future__ import annotations

import pytest

from tools_sandbox.service import server


@pytest.mark.parametrize(
  ("arguments", "missing", "backend"),
  [
    ([], ["no namespaces"], "jail"),  # which then refuses to start
    (["--allow-weaker"], ["no namespaces"], "subprocess"),
    (["--allow-weaker"], [], "jail"),
    (["--backend=subprocess"], [], "subprocess"),
  ],
)
def test_what_is_lost_is_said(monkeypatch, capsys, arguments, missing, backend):
  class Stop(Exception):
    pass

  def start(slots, backend):
    raise Stop(backend)

  monkeypatch.setattr(server.jail, "check", lambda: missing)
  monkeypatch.setattr(server.pool, "SandboxPool", start)
  args = server.make_parser().parse_args([*arguments, "--port=0"])
  with pytest.raises(Stop, match=backend):
    server.serve(args)
  errors = capsys.readouterr().err
  assert ("the network is open" in errors) == (backend == "subprocess")
  assert ("no jail: no namespaces" in errors) == bool(
    missing and backend == "subprocess"
  )
