"""Trains a byte-level BPE tokenizer with the protocol's tags."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
import transformers

from coa_jax.protocol import roles
from coa_jax.protocol.tokens import IM_END, IM_START, PAD, Tokenizer
from coa_jax.protocol.tools import SPECS, TagIds

_TEMPLATE = (
  "{% for m in messages %}" + IM_START + "{{ m['content'] }}" + IM_END + "{% endfor %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
  """Trains a byte-level BPE with one token per protocol tag and per digit.

  Only the tag `tool` is spelt as text (`tools.TagIds`).

  Args:
    texts: training text; tags in it are not counted.
    vocab_size: total ids, including the 256 bytes, tags and control tokens.

  Raises:
    ValueError: vocab_size leaves no room for bytes and tags.
  """
  # --- The tags' ids, before the bytes and merges or after them.
  first = []
  last = []
  for tag, spec in SPECS.items():
    if spec.tag_ids == TagIds.FIRST:
      first.append(tag)
    elif spec.tag_ids == TagIds.LAST:
      last.append(tag)
  special = [PAD, IM_START, IM_END]
  special += roles.tags_of([*roles.ROLES, *first, roles.OBSERVATION])
  # A `SPECS` row takes the ids below the earlier rows', so a new row only replaces the
  # last two merges and moves no other id.
  at_the_end = roles.tags_of(reversed(last))
  least = 256 + len(special) + len(at_the_end)
  if vocab_size < least:
    raise ValueError(f"vocab_size must be at least {least}")

  # --- Train: single digits, otherwise words.
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  split = tokenizers.pre_tokenizers
  model.pre_tokenizer = split.Sequence(
    [
      split.Digits(individual_digits=True),
      split.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )
  model.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size - len(at_the_end),
    special_tokens=special,
    initial_alphabet=split.ByteLevel.alphabet(),
    show_progress=False,
  )
  model.train_from_iterator(texts, trainer)

  # --- Add the tags with the last ids.
  if at_the_end:
    # Texts with too few merges leave ids unused; these ids stay reserved.
    unused = vocab_size - len(at_the_end) - model.get_vocab_size()
    model.add_special_tokens([f"<|reserved_{i}|>" for i in range(unused)])
    model.add_special_tokens(at_the_end)
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=model, pad_token=PAD, eos_token=IM_END, chat_template=_TEMPLATE
  )
  return Tokenizer(hf)
