"""A size too large for memory is refused by name; any other passes."""

from __future__ import annotations

import pytest

from coa_jax.runtime import capacity


def test_the_largest_need_is_named():
  capacity.check({"small": 40, "large": 60}, 100, "there are")
  with pytest.raises(ValueError, match=r"too large.*: large: 2 GB; small: 1 GB; there"):
    capacity.check({"small": 10**9, "large": 2 * 10**9}, 100, "there are")


def test_the_machine_has_more_than_nothing_and_less_than_anything():
  capacity.check_host({"a.field=1": 1})
  with pytest.raises(ValueError, match=r"a\.field=9: .* this machine has"):
    capacity.check_host({"a.field=9": 1 << 70})
