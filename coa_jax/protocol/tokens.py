"""Tokenizer, chat template, and trajectories as token ids with authorship.

Two kinds of tokenizers work alike: ours, with one added token per protocol tag
(`tokenizer_training`), and stock byte-level tokenizers (Qwen's), which encode tags as
ordinary text. Foreign text (questions, observations) is encoded so that no part can
become a control token.

budget: the laws between text and ids (round trips, authorship) are in one place.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence

import tokenizers
import transformers

from coa_jax.protocol import chat_template, roles, tokenizer_folder
from coa_jax.protocol.excerpt import cut_middle
from coa_jax.protocol.trajectory import Author, Segment, Trajectory
from coa_jax.runtime.disk import atomic_write
from coa_jax.runtime.json_io import read_object, shown

_CONFIG = "tokenizer_config.json"
# Transformers 5's name for any fast tokenizer; 4 has no class of this name.
_ONLY_5 = "TokenizersBackend"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
PAD = "<|endoftext|>"
# Bytes: an observation's tags, and the cut marker for the longest possible text.
MIN_OBSERVATION = 80
# Bytes in valid UTF-8 text.
_UTF8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
# A tokenizer may lack these bytes (SmolLM2's lacks 8): they occur only in control
# characters and in unassigned Unicode planes.
_RARE = {b: chr(b) for b in {*range(32), 127} - set(b"\t\n\r")}
_RARE |= {0xF1: "\U00040000-\U0007ffff", 0xF2: "\U00080000-\U000bffff"}

_Part = tuple[str, bool]  # text, and whether it may contain control tokens


class Tokenizer:
  """A Hugging Face byte-level tokenizer with the protocol's operations."""

  def __init__(
    self,
    hf: transformers.PreTrainedTokenizerFast,
    kind: str = "PreTrainedTokenizerFast",
  ):
    """Wraps `hf`; `kind` is the tokenizer class that `save` writes.

    Raises:
      ValueError: `hf` is not byte-level, so ids have no exact bytes.
    """
    self.hf = hf
    self._kind = kind
    self._trusted = hf.backend_tokenizer
    # A saved folder keeps the last call's truncation.
    self._trusted.no_truncation()
    self._trusted.no_padding()
    # Foreign text spells special tokens as bytes, so every token outside the merges
    # becomes special, Qwen's <tool_call> too.
    state = json.loads(self._trusted.to_str())
    for token in state["added_tokens"]:
      token["special"] = True
    self._untrusted = tokenizers.Tokenizer.from_str(json.dumps(state))
    self._untrusted.encode_special_tokens = True
    if not isinstance(self._trusted.decoder, tokenizers.decoders.ByteLevel):
      raise ValueError(
        f"tokenizer decodes with {type(self._trusted.decoder).__name__}; only "
        "byte-level tokenizers (Qwen, GPT-2 and the like) keep every id's bytes"
      )

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
    """Reads a tokenizer folder (tokenizer.json and tokenizer_config.json).

    Raises:
      FileNotFoundError: the folder lacks tokenizer.json.
      ValueError: a file is malformed, the tokenizer is not byte-level, or its chat
        template cannot be used; the message names the file.
    """
    file = os.path.join(path, "tokenizer.json")
    if not os.path.exists(file):
      raise FileNotFoundError(f"{file}: no tokenizer there")
    config = os.path.join(path, _CONFIG)
    # The libraries' errors name no file, and loading already normalizes.
    tokenizer_folder.check(file)
    kind = None
    if os.path.exists(config):
      kind = read_object(config).get("tokenizer_class")
      if not isinstance(kind, str | None):
        raise ValueError(f"{config}: field 'tokenizer_class' is {shown(kind)}, no name")
    try:
      hf = transformers.PreTrainedTokenizerFast.from_pretrained(os.fspath(path))
      if kind in (None, _ONLY_5):
        loaded = cls(hf)
      else:
        loaded = cls(hf, kind)
      # Fails here if a token is not a byte sequence.
      missing = loaded._missing - set(_RARE)
    except Exception as e:  # the libraries raise plain Exception
      reason = " ".join(f"{e!r:.200}".split())
      raise ValueError(f"{file} and {_CONFIG}: no usable tokenizer ({reason})") from e
    if missing:
      raise ValueError(
        f"{file}: {len(missing)} bytes have no token (the first is {min(missing)}), so "
        "that text of them would be lost"
      )
    if hf.chat_template:
      try:
        _ = loaded.chat_frame
      except ValueError as e:
        reason = " ".join(str(e).split())
        raise ValueError(f"{tokenizer_folder.template_file(path)}: {reason}") from e
    return loaded

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a folder for `load` and Hugging Face, transformers 4 included."""
    self.hf.save_pretrained(os.fspath(path))
    file = os.path.join(path, _CONFIG)
    with open(file, encoding="utf-8") as f:
      config = json.load(f)
    config["tokenizer_class"] = self._kind
    # These fields tell how this process loaded the tokenizer.
    for field in ("is_local", "local_files_only"):
      config.pop(field, None)
    # transformers 4 knows this list by another name, which 5 reads too.
    if isinstance(config.get("extra_special_tokens"), list):
      config["additional_special_tokens"] = config.pop("extra_special_tokens")
    with atomic_write(file) as f:
      json.dump(config, f, indent=2, sort_keys=True, ensure_ascii=False)

  @property
  def vocab_size(self) -> int:
    """One more than the largest id."""
    return self._trusted.get_vocab_size(with_added_tokens=True)

  @functools.cached_property
  def end_id(self) -> int | None:
    """An answer's last id, at which `generate` and `vllm serve` stop.

    This is `</answer>` if the tag is one token. A stock tokenizer encodes the tag as
    text; then this is end-of-text, which SFT trains after the answer, or None.
    """
    for i, text in self.added.items():
      if text == roles.close_tag(roles.ANSWER):
        return i
    return self.hf.eos_token_id

  def encode(self, text: str) -> list[int]:
    """Encodes trusted text: tags and control tokens become their ids."""
    return self._ids(self._trusted, [text])[0]

  def encode_untrusted(self, text: str) -> list[int]:
    """Encodes foreign text: tags and control tokens stay plain text."""
    return self._ids(self._untrusted, [text])[0]

  def decode(self, ids: Sequence[int]) -> str:
    """Decodes ids, control tokens included; broken UTF-8 is replaced."""
    return self.raw(ids).decode("utf-8", "replace")

  def raw(self, ids: Iterable[int]) -> bytes:
    """Returns the ids' bytes, which may begin or end within a character."""
    return b"".join(self._bytes(i) for i in ids)

  @functools.cached_property
  def bytes_of(self) -> list[bytes]:
    """Each id's bytes (b"" for ids without a token)."""
    to_byte = {c: b for b, c in _byte_alphabet().items()}
    out = [b""] * self.vocab_size
    for token, i in self._trusted.get_vocab(with_added_tokens=True).items():
      if i in self.added:
        out[i] = self.added[i].encode()
      else:
        out[i] = bytes(to_byte[c] for c in token)
    return out

  @functools.cached_property
  def _missing(self) -> frozenset[int]:
    """UTF-8 bytes without a token."""
    return _UTF8 - {text[0] for text in self.bytes_of if len(text) == 1}

  @functools.cached_property
  def _unspelt(self) -> re.Pattern[str] | None:
    """Matches a `_RARE` character without tokens; None if all have tokens."""
    ranges = "".join(_RARE[b] for b in sorted(self._missing & set(_RARE)))
    return re.compile(f"[{ranges}]") if ranges else None

  def _spelt(self, text: str) -> str:
    """Replaces each character without ids by "?"."""
    # A tokenizer refuses a lone surrogate (JSON can hold one).
    text = text.encode("utf-8", "replace").decode()
    return self._unspelt.sub("?", text) if self._unspelt else text

  def _ids(
    self, tokenizer: tokenizers.Tokenizer, texts: Sequence[str]
  ) -> list[list[int]]:
    # As `encode`, without the unused offsets: a tenth to a fifth faster.
    whole = [self._spelt(text) for text in texts]
    encodings = tokenizer.encode_batch_fast(whole, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]

  @functools.cached_property
  def _longest(self) -> int:
    return max(map(len, self.bytes_of))

  @functools.cached_property
  def added(self) -> dict[int, str]:
    """Ids outside the merges, with their text: control tokens, tags."""
    decoder = self._trusted.get_added_tokens_decoder()
    return {i: token.content for i, token in decoder.items()}

  def _bytes(self, i: int) -> bytes:
    # A model's embedding has more rows than the tokenizer has ids; the additional ids
    # have no text.
    return self.bytes_of[i] if i < len(self.bytes_of) else b""

  @functools.cached_property
  def chat_frame(self) -> tuple[list[int], list[int]]:
    """Returns the chat template's ids before a user's message, and after it.

    A `<think>` at the very end (DeepSeek-R1, QwQ) is left out: the policy writes this
    first protocol tag itself, and is trained on it like on every other.

    Raises:
      ValueError: there is no template, or the template is unusable
        (`chat_template.frame`) or opens another protocol span.
    """
    if not self.hf.chat_template:
      where = self.hf.name_or_path or "the tokenizer"
      raise ValueError(f"{where}: no chat template, which makes a prompt of a question")
    before, after = chat_template.frame(
      self.hf.get_chat_template(), self.hf.special_tokens_map
    )
    return self.encode(before), self.encode(_without_spans(after))

  def encode_prompt(self, prompt: Sequence[Segment]) -> None:
    """Fills the prompt segments' ids, including the chat template around them.

    The template's opening goes to the first segment and its closing to the last.
    """
    for s in prompt:
      if s.role == "instructions":
        s.ids = self.encode(s.text)
      else:
        s.ids = self.encode_untrusted(s.text)
    before, after = self.chat_frame
    prompt[0].ids = before + prompt[0].ids
    prompt[-1].ids = prompt[-1].ids + after

  def encode_observation(self, content: str) -> Segment:
    """Turns a tool's output into an observation segment: escaped, tagged, with ids."""
    text = _wrapped(content)
    segment = Segment(Author.TOOL, roles.OBSERVATION, text)
    segment.ids = self._observation_ids(text)
    return segment

  def cut_observation(self, content: str, limit: int) -> str:
    """Cuts the middle out of a tool's output if its observation would be too long.

    Args:
      content: the tool's output, of any length.
      limit: maximum ids in the returned text's observation, tags included; at least
        `MIN_OBSERVATION`.

    Returns:
      `content`, or the longest head and tail that fit, verbatim, around a marker with
        the number of removed characters.
    """
    if limit < MIN_OBSERVATION:
      raise ValueError(f"limit must be at least {MIN_OBSERVATION}, got {limit}")

    def cut(keep: int) -> str | None:
      """Cuts `content` to `keep` characters; None if its observation is too long."""
      text = cut_middle(content, keep)
      if len(self._observation_ids(_wrapped(text))) > limit:
        return None
      return text

    # Longer content cannot fit, so it need not be encoded.
    if len(content) <= limit * self._longest and cut(len(content)) is not None:
      return content

    # --- Double `keep` until the text is too long, so that at most about twice the
    # result is encoded. The count is not quite monotone in `keep`; the returned text
    # has always been counted.
    best = cut(0)
    low = 0
    high = limit
    while high < len(content):
      text = cut(high)
      if text is None:
        break
      best = text
      low = high
      high *= 2
    high = min(high, len(content))

    # --- Then bisect between fitting and not fitting.
    while high - low > 1:
      middle = (low + high) // 2
      text = cut(middle)
      if text is None:
        high = middle
      else:
        best = text
        low = middle
    assert best is not None, "a marker has fewer bytes than MIN_OBSERVATION"
    return best

  def _observation_ids(self, text: str) -> list[int]:
    return list(itertools.chain.from_iterable(self._encode(_parts(text))))

  def _encode(self, parts: Sequence[_Part]) -> list[list[int]]:
    """Encodes each text, one batch per kind: the tokenizer is multi-threaded."""
    encoded = {}
    for kind, tokenizer in ((True, self._trusted), (False, self._untrusted)):
      texts = [text for text, is_trusted in parts if is_trusted == kind]
      encoded[kind] = iter(self._ids(tokenizer, texts))
    return [next(encoded[is_trusted]) for _, is_trusted in parts]

  def encode_trajectories(self, trajectories: Iterable[Trajectory]) -> None:
    """Fills the segments' missing ids in place, on all cores.

    Each segment is encoded on its own, so no token ever straddles two authors.
    """
    # --- Encode prompts at once, and collect other segments without ids.
    todo: list[tuple[Segment, list[_Part]]] = []
    for t in trajectories:
      prompt = [s for s in t.segments if s.author == Author.PROMPT]
      if prompt and not any(s.ids for s in prompt):
        self.encode_prompt(prompt)
      for s in t.segments:
        if s.ids or s.author == Author.PROMPT:
          continue
        if s.author == Author.POLICY:
          todo.append((s, [(s.text, True)]))
        else:
          todo.append((s, _parts(s.text)))

    # --- Encode all parts together, and return the ids in the same order.
    parts: list[_Part] = []
    for _, of_segment in todo:
      parts += of_segment
    encoded = iter(self._encode(parts))
    for s, of_segment in todo:
      mine = itertools.islice(encoded, len(of_segment))
      s.ids = list(itertools.chain.from_iterable(mine))

  def check_ids(self, trajectory: Trajectory) -> None:
    """Refuses another tokenizer's ids.

    Raises:
      ValueError: a policy segment's ids do not spell its text.
    """
    for s in trajectory.segments:
      if s.author != Author.POLICY or not s.ids:
        continue
      if self.decode(s.ids) not in self._spellings(s.text):
        raise ValueError(
          f"trajectory {trajectory.task_id!r}: the ids of {s.text[:40]!r} spell "
          f"{self.decode(s.ids)[:40]!r}; they are another tokenizer's than the model's"
        )

  def _spellings(self, text: str) -> set[str]:
    """Returns a text's valid decodings: itself, and its normalized form (Qwen: NFC)."""
    text = self._spelt(text)
    normalizer = self._trusted.normalizer
    if normalizer is None:
      return {text}
    return {text, normalizer.normalize_str(text)}

  def policy_segments(
    self, ids: Sequence[int], logps: Sequence[float], versions: Sequence[int]
  ) -> list[Segment]:
    """Cuts sampled ids into segments, after each closing tag.

    The ids are never decoded and encoded again: a token that ends one span and begins
    the next stays whole, in the first span.
    """
    # --- Cut after the token that completes a closing tag, counted in bytes.
    ends = list(itertools.accumulate(len(self._bytes(i)) for i in ids))
    cuts = {0, len(ids)}
    for closing in _CLOSING.finditer(self.raw(ids)):
      cuts.add(bisect.bisect_left(ends, closing.end()) + 1)

    # --- A segment is the ids between two cuts.
    out = []
    for a, b in itertools.pairwise(sorted(cuts)):
      text = self.decode(ids[a:b])
      role = ""
      if opening := _OPENING.search(text):
        role = opening[1]
      out.append(
        Segment(
          author=Author.POLICY,
          role=role,
          text=text,
          ids=list(ids[a:b]),
          logps=list(logps[a:b]),
          versions=list(versions[a:b]),
        )
      )
    return out


def _without_spans(after: str) -> str:
  """Removes a `<think>` at a prompt's end; refuses other unclosed spans."""
  after = re.sub(rf"{roles.open_tag(roles.THINK)}\s*\Z", "", after)
  for name in roles.SPANS:
    opening = roles.open_tag(name)
    if after.count(opening) > after.count(roles.close_tag(name)):
      raise ValueError(
        f"the chat template opens {opening}, which the model is to write"
      )
  return after


def _wrapped(content: str) -> str:
  return roles.wrap(roles.OBSERVATION, roles.escape(content))


def _parts(text: str) -> list[_Part]:
  """Splits an observation from `_wrapped`: only its tags are trusted."""
  opening = roles.open_tag(roles.OBSERVATION)
  closing = roles.close_tag(roles.OBSERVATION)
  start = text.find(opening)
  content = start + len(opening)
  end = text.rfind(closing)
  if start < 0 or end < content:  # not as `_wrapped` writes it: no tag is trusted
    return [(text, False)]
  return [(text[:content], True), (text[content:end], False), (text[end:], True)]


_NAMES = "|".join((*roles.ROLES, *roles.TOOLS, roles.CONTEXT_SUMMARY))
_CLOSING = re.compile(rf"</(?:{_NAMES})>".encode())
# The "<" of an opening tag may be in the previous segment's last token.
_OPENING = re.compile(rf"(?:<|^)({_NAMES})>")


def _byte_alphabet() -> dict[int, str]:
  """Returns GPT-2's map from bytes to printable characters, used by byte-level BPE."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  out = {b: chr(b) for b in printable}
  for b in range(256):
    if b not in out:
      out[b] = chr(256 + len(out) - len(printable))
  return out
