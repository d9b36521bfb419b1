"""text8-style cleaning: nothing but a-z and single spaces, digits spelled out, markup removed.

`clean_wikitext` follows the rules that made text8 out of a Wikipedia dump, closely enough to find
where a stretch of the dump lies in text8; `clean_rst` does the same for reStructuredText.
"""

from __future__ import annotations

import re

_DIGIT_NAMES = (b"zero", b"one", b"two", b"three", b"four", b"five", b"six", b"seven", b"eight",
                b"nine")
# Upper case to lower case, letters kept, every other byte to a space.
_LETTERS = bytes(
    byte + 32 if 65 <= byte <= 90 else byte if 97 <= byte <= 122 else 32 for byte in range(256))


def normalize(text: bytes) -> bytes:
  """Spells out digits, lowers case, and turns every run of other bytes into one space."""
  for digit, name in enumerate(_DIGIT_NAMES):
    text = text.replace(b"%d" % digit, b" " + name + b" ")
  return b" ".join(text.translate(_LETTERS).split())


def _rules(*pairs: tuple[str, str]) -> list[tuple[re.Pattern[bytes], bytes]]:
  return [(re.compile(pattern.encode(), re.IGNORECASE | re.MULTILINE), replacement.encode())
          for pattern, replacement in pairs]


def _apply(rules: list[tuple[re.Pattern[bytes], bytes]], text: bytes) -> bytes:
  for pattern, replacement in rules:
    text = pattern.sub(replacement, text)
  return text


# What a reader of the page does not see goes; captions and link texts stay.
_WIKI_RULES = _rules(
    (r"<ref[^<]*</ref>", ""),
    (r"<[^>]*>", ""),
    (r"\[https?:[^] ]*", "["),  # external link: keep its text
    (r"\|(?:thumb|left|right|\d+px)", ""),
    (r"\[\[image:[^\[\]]*\|", ""),  # image: keep its caption
    (r"\[\[category:([^|\]]*)[^\]]*\]\]", r"\1"),
    (r"\[\[[a-z-]*:[^\]]*\]\]", ""),  # the same article in other languages
    (r"\[\[[^|\]]*\|", ""),  # link: keep its text
    (r"\{\{[^}]*\}\}", ""),
    (r"\{[^}]*\}", ""),
    (r"[\[\]]", ""),
    (r"&[^;\s]{0,10};", " "),
)
_PAGE_TEXT = re.compile(rb"<text\b[^>]*>(.*?)(?:</text>|\Z)", re.DOTALL)
_REDIRECT = re.compile(rb"#redirect", re.IGNORECASE)


def clean_wikitext(dump: bytes) -> bytes:
  """Cleans a stretch of a MediaWiki XML dump; it may begin or end inside an article."""
  close = dump.find(b"</text>")
  if close >= 0 and not 0 <= dump.find(b"<text") < close:
    dump = b"<text>" + dump
  articles = []
  for match in _PAGE_TEXT.finditer(dump):
    text = match[1]
    if _REDIRECT.search(text):
      continue
    for entity, character in ((b"&lt;", b"<"), (b"&gt;", b">"), (b"&amp;", b"&")):
      text = text.replace(entity, character)
    articles.append(_apply(_WIKI_RULES, text))
  return normalize(b" ".join(articles))


# Directives that only steer the build vanish with their argument, the others keep it.
_RST_RULES = _rules(
    (r"^[ \t]*\.\.[ \t]+(?:module|(?:section|module)author|index|highlight|code-block|toctree|"
     r"include|literalinclude|currentmodule|tabularcolumns|program|testsetup)::.*$", ""),
    (r"^[ \t]*\.\.[ \t]+(?:_[^:\n]*|\[[^\]\n]*\]|\|[^|\n]*\|)[ \t:].*$", ""),  # targets
    (r"^[ \t]*\.\.[ \t]+(?:[a-z]+:)?[a-z-]+::", " "),
    (r"^[ \t]*:[a-z-]+:(?=[ \t\n])", " "),  # directive options and fields
    (r":(pep|rfc|issue):`", r"\1 `"),  # roles whose name is printed
    (r":(?:[a-z]+:)?[a-z-]+:`", "`"),
    (r"\s<[^<>`]*>`", "`"),  # the target of `text <target>`
    (r"https?://[^\s`>)]+", " "),
)


def clean_rst(text: bytes) -> bytes:
  """Cleans reStructuredText: directives, roles and link targets go, what is read stays."""
  return normalize(_apply(_RST_RULES, text))
