"""Makes untrusted text safe to show: no control or invisible characters."""

from __future__ import annotations

import re

# Control characters except tab and line ends; lone surrogates; Unicode's specials.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufff9-\uffff]")
# Invisible characters can hide or reverse text: Unicode's default-ignorable characters
# and other layout controls. Visible characters in category Cf stay (Arabic number
# signs). So do joiners between letters in scripts with a need for them (Persian, Indian
# scripts), but not in emoji, which are readable without joiners.
_INVISIBLE = re.compile(
  "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f"
  "\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8"
  "\U00013430-\U0001345f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
  "\U000e0000-\U000e0fff]"
  "|(?<![\u0600-\u1cff])[\u200c\u200d]|[\u200c\u200d](?![\u0600-\u1cff])"
)


def clean(text: str) -> str:
  """Removes control, invisible and direction-changing characters."""
  return _INVISIBLE.sub("", CONTROL.sub("", text))
