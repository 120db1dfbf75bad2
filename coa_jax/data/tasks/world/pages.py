"""A seeded world's pages: names, facts, page texts, and a page reader.

Towns, people, films and companies refer to one another. A page has one or two short
lines, so that an observation costs a small model few tokens.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence


def _words(heads: str, tails: str = "") -> tuple[str, ...]:
  """Joins every head with every tail, tails varying fastest; no tails: heads alone."""
  return tuple(h + t for h in heads.split() for t in tails.split() or ("",))


# Words use few syllables, so that a small BPE can encode each as one token.
_GIVEN = _words(
  "Ba De Fi Jo Ka Le Mi Na Ro Sa Ta Vi", "ra len no vin sa mo dan ris ta bel"
)
_FAMILY = _words(
  "Bar Cal Dor Fen Gar Hal Kel Lor Mer Nor Pel Ran Sel Tor Wen",
  "der ick man son ley ett ard well ing kin",
)
_PLACE = _words(
  "Ash Brim Cold East Fair Green High Long Mill Stone",
  "ford bury ham ton mere wick dale port gate field",
)
_QUALITY = _words(
  "Red Blue Dark Pale Wild Lost Slow Deep Bold Calm Dim Dry Grey Gold Iron Kind Late "
  "Lone Loud Mad New Odd Old Raw Rich Sad Shy Soft Sour Tall Thin Vast Warm Weak Wet "
  "Young"
)
_TRADE = _words(
  "Works Mills Motors Labs Foods Books Tools Lines Bank Press Steel Glass Paper Ships "
  "Trade Media Power Water Wood Clay Silk Salt Farms Mines Tea Toys Cars Gas Maps Pens"
)
_REGIONS = _words("Ar Bel Cor Del Es Fal Nor Tam", "via mark")
_OCCUPATIONS = _words(
  "baker carpenter doctor farmer lawyer miner nurse painter pilot poet potter sailor "
  "singer surgeon tailor weaver"
)
# A name's two words, by kind; 36 worlds with default sizes have no duplicate name.
NAME_WORDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
  "town": (_FAMILY, _PLACE),
  "person": (_GIVEN, _FAMILY),
  "film": (_QUALITY, _PLACE),
  "company": (_FAMILY, _TRADE),
}

PAGES = {
  "town": "{name} is a town in {region}, founded in {founded}. "
  "Population {population}. Mayor {mayor}.",
  "person": "{name} is a {occupation}, born in {born} in {birthplace}.",
  "film": "{name} is a film, released in {released}. Director {director}.",
  "company": "{name} is a company, founded in {founded}. "
  "Headquarters {headquarters}. Founder {founder}.",
}
# Kind -> relation -> the linked entity's kind.
LINKS: Mapping[str, Mapping[str, str]] = {
  "town": {"mayor": "person"},
  "person": {"birthplace": "town"},
  "film": {"director": "person"},
  "company": {"headquarters": "town", "founder": "person"},
}


@dataclasses.dataclass(frozen=True)
class World:
  """A closed world: facts about its entities, and a page for each entity.

  Attributes:
    name: split and number, e.g. "train-03".
    facts: entity name -> {"kind": ..., relation: value}; values are strings.
    pages: {"id", "title", "text"} for every entity, in a fixed order.
  """

  name: str
  facts: Mapping[str, Mapping[str, str]]
  pages: tuple[dict[str, str], ...]

  def names(self, kind: str) -> list[str]:
    """Lists every entity of a kind, in page order."""
    return [name for name, facts in self.facts.items() if facts["kind"] == kind]


def make_facts(
  deck: Mapping[str, Sequence[str]], rng: random.Random
) -> dict[str, dict[str, str]]:
  """Draws facts for every name in a deck (kind -> names), in `World.facts` form.

  Directors and founders are 21 to 60 years old at the time.
  """
  # The order of loops and draws defines the world: another order changes every
  # seed's facts.
  facts: dict[str, dict[str, str]] = {}
  for name in deck["town"]:
    facts[name] = dict(
      kind="town",
      region=rng.choice(_REGIONS),
      founded=str(rng.randint(1100, 1899)),
      population=str(100 * rng.randint(10, 99)),
      mayor=rng.choice(deck["person"]),
    )
  for name in deck["person"]:
    facts[name] = dict(
      kind="person",
      occupation=rng.choice(_OCCUPATIONS),
      born=str(rng.randint(1890, 1959)),
      birthplace=rng.choice(deck["town"]),
    )
  for kind, role, year in (
    ("film", "director", "released"),
    ("company", "founder", "founded"),
  ):
    for name in deck[kind]:
      person = rng.choice(deck["person"])
      when = int(facts[person]["born"]) + rng.randint(21, 60)
      facts[name] = {"kind": kind, role: person, year: str(when)}
      if kind == "company":
        facts[name]["headquarters"] = rng.choice(deck["town"])
  return facts


def page_text(name: str, facts: Mapping[str, str]) -> str:
  """Returns an entity's page text, which starts with the entity's name."""
  return PAGES[facts["kind"]].format(name=name, **facts)


def filler(words: int, rng: random.Random) -> str:
  """Returns text without facts: lower-case words."""
  return " ".join(rng.choice(_QUALITY).lower() for _ in range(words)) + "."


def _pattern(template: str) -> re.Pattern[str]:
  """Makes a regular expression for a template's pages, with a named group per field."""
  # Fields with an entity's name have two words; other fields have one.
  names = {"name"}.union(*LINKS.values())

  def group(match: re.Match[str]) -> str:
    if match[1] in names:
      return rf"(?P<{match[1]}>[A-Z]\w* [A-Z]\w*)"
    return rf"(?P<{match[1]}>\w+)"

  # `escape` also escapes a field's braces; undo this.
  escaped = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
  return re.compile(re.sub(r"\{(\w+)\}", group, escaped))


_READ = {kind: _pattern(template) for kind, template in PAGES.items()}


def read_pages(text: str) -> dict[str, dict[str, str]]:
  """Reads every page in a text, e.g. a search result: name -> facts.

  Facts are as in `World.facts`. Other text is skipped.
  """
  pages = {}
  for kind, pattern in _READ.items():
    for match in pattern.finditer(text):
      facts = match.groupdict()
      name = facts.pop("name")
      pages[name] = {"kind": kind, **facts}
  return pages
