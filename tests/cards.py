"""Reads a card written by coa-jax."""

from __future__ import annotations

import json
import pathlib
import re

import yaml


def read_card(folder: pathlib.Path) -> tuple[dict, dict, str]:
  """The card's front matter, its JSON sections and its text."""
  text = (folder / "README.md").read_text()
  _, front, body = text.split("---\n", 2)
  sections = re.findall(r"^## (\w+)\n\n```json\n(.*?)\n```$", body, re.M | re.S)
  return yaml.safe_load(front), {k: json.loads(v) for k, v in sections}, body
