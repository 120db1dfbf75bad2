"""The sandbox back-end for tests: the jail, if this machine supports it.

Tests that run programs pass `BACKEND` explicitly: the library's default is the jail,
and it never falls back to a weaker one. Tests of the jail itself use `needs_jail`.
"""

from __future__ import annotations

import pytest

from tools_sandbox.jail import keeper

MISSING = keeper.check()
WHY = "; ".join(MISSING)
BACKEND = "subprocess" if MISSING else "jail"
needs_jail = pytest.mark.skipif(bool(MISSING), reason=WHY)
BACKENDS = ["subprocess", pytest.param("jail", marks=needs_jail)]
