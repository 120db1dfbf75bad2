"""Prints docs/config.md: every field of every config, from the dataclasses.

python -m experiments.config_reference > docs/config.md
"""

from __future__ import annotations

import sys

from coa_jax.cli.config_help import SECTIONS_BY_NAME, Field, list_fields
from coa_jax.cli.select_tasks import SelectTasksConfig
from coa_jax.cli.synthesize import SynthesizeConfig
from coa_jax.distill import DistillConfig
from coa_jax.evaluate import EvaluateConfig
from coa_jax.plan.rl import RLConfig
from coa_jax.plan.sft import SFTConfig

CONFIGS = {
  "distill": DistillConfig,
  "sft": SFTConfig,
  "rl": RLConfig,
  "evaluate": EvaluateConfig,
  "synthesize": SynthesizeConfig,
  "select_tasks": SelectTasksConfig,
}


def reference() -> str:
  """Writes the page: all programs, and a section that several of them read once."""
  lines = [
    "# Every field of every config",
    "",
    "Made by `python -m experiments.config_reference > docs/config.md` from the",
    "dataclasses that the configs are read into. In a terminal",
    "`python -m experiments.rl --config=configs/rl_world.py --config.help=algo` says",
    "the same, with the values of that file. Change any field by a flag,",
    "`--config.algo.steps=100`; `=None` empties it.",
    "",
  ]

  # --- The fields of each journey, by their section.
  sections: dict[str, dict[Field, list[str]]] = {}
  for journey, cls in CONFIGS.items():
    for field in list_fields(cls):
      above = field.path.rpartition(".")[0] or journey
      readers = sections.setdefault(above, {}).setdefault(field, [])
      readers.append(journey)

  # --- A table for each.
  for above, fields in sections.items():
    all_readers = sorted({name for readers in fields.values() for name in readers})
    if above in CONFIGS:
      lines += [f"## Sections of {above}", ""]
    else:
      lines += [f"## {above}", "", f"Of {', '.join(all_readers)}.", ""]
    lines += ["| field | values | default | meaning |", "|---|---|---|---|"]
    for field, readers in fields.items():
      name = field.path.rpartition(".")[2]
      meaning = field.meaning
      if sorted(readers) != all_readers:
        meaning = f"({', '.join(readers)}) {meaning}"
      if field.section:
        chapter = f"{field.path}.NAME" if field.kind == SECTIONS_BY_NAME else field.path
        name = f"[{name}](#{chapter.replace('.', '').lower()})"
      default = f"`{field.default}`" if field.default else ""
      if not field.section and not field.default:
        default = "required"
      cells = (name, field.kind, default, meaning)
      lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines.append("")
  return "\n".join(lines)


if __name__ == "__main__":
  sys.stdout.write(reference())
