"""The soak of the jail finds nothing left behind, and would find it."""

from __future__ import annotations

import pytest

from experiments.bench import soak_sandbox
from tools_sandbox.jail import keeper as jail

_missing = jail.check()
pytestmark = pytest.mark.skipif(bool(_missing), reason="; ".join(_missing))


@pytest.mark.slow
def test_hostile_runs_leave_nothing():
  figures = soak_sandbox.soak(300)
  assert figures["runs"] == 300 and "infrastructure" not in figures["verdicts"]
  assert len(figures["verdicts"]) >= 3  # they were not all stopped in the same way


def test_a_leak_is_an_error(monkeypatch, tmp_path):
  class Leaky(soak_sandbox.Sandbox):
    def run(self, *args, **kwargs):
      self.leaked = [*getattr(self, "leaked", []), open(tmp_path / "f", "w")]  # noqa: SIM115
      return super().run(*args, **kwargs)

    def close(self):
      for file in self.leaked:
        file.close()
      super().close()

  monkeypatch.setattr(soak_sandbox, "Sandbox", Leaky)
  monkeypatch.setattr(soak_sandbox, "_HOSTILE", ("1 / 0",))
  monkeypatch.setattr(soak_sandbox, "_SETTLE_S", 1.0)
  with pytest.raises(ValueError, match=r"leaks: .*'descriptors'"):
    soak_sandbox.soak(5)
