"""Which back-end runs the programs of tests: the jail, where this machine has one.

Tests that run programs ask for `BACKEND` by name: the library's own default is the
jail, and it never takes a weaker one unasked. Tests of the jail itself `needs_jail`.
"""

from __future__ import annotations

import pytest

from tools_sandbox.jail import keeper

MISSING = keeper.check()
WHY = "; ".join(MISSING)
BACKEND = "subprocess" if MISSING else "jail"
needs_jail = pytest.mark.skipif(bool(MISSING), reason=WHY)
BACKENDS = ["subprocess", pytest.param("jail", marks=needs_jail)]
