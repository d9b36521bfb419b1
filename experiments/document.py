"""Documents as blocks, and how they read as HTML and as Markdown.

No number comes without the command that makes it: tables and figures cannot be built without one.
Texts may hold `code` between backticks and **bold** words, and nothing else.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
import html
import os
from pathlib import Path
import re
from typing import NamedTuple

_MEDIA = {".svg": "image/svg+xml", ".png": "image/png"}
_MARKUP = re.compile(r"\*\*((?:`[^`]*`|[^`])+?)\*\*|`([^`]*)`")  # bold words, which may hold code
_STYLE = """
:root { color-scheme: light dark; --edge: #8886; --shade: #8881;
  --link: light-dark(#0550ae, #8ab4f8) }
body { font: 1rem/1.5 system-ui, sans-serif; margin: 0 auto; padding: 0 1rem 4rem;
  max-width: 80rem }
p, li, figcaption { max-width: 48rem }
a { color: var(--link) }
h1, h2, h3 { line-height: 1.25; margin-top: 2rem }
code, pre { font: .875em/1.4 ui-monospace, monospace; background: var(--shade) }
code { padding: .1em .25em; overflow-wrap: anywhere }
pre { padding: .5rem; white-space: pre-wrap; overflow-wrap: anywhere }
pre code { background: none; padding: 0; font-size: 1em }
.scroll { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }
caption { text-align: left; padding-bottom: .4rem; font-size: 1rem }
caption span { display: block; position: sticky; left: 0; max-width: min(48rem, 100vw - 2rem) }
th, td { border-bottom: 1px solid var(--edge); padding: .25rem .6rem; text-align: left;
  vertical-align: top; max-width: 32rem }
td:last-child { min-width: 8rem }
thead th { border-bottom-width: 2px }
.note { font-size: .875rem; margin: .25rem 0 }
figure { margin: 1.5rem 0 }
img { max-width: 100%; height: auto; background: #fff }
details { margin: 1rem 0 }
summary { cursor: pointer }
nav ul { columns: 20rem; padding-left: 1.2rem }
"""


class Heading(NamedTuple):
  level: int
  text: str


class Paragraph(NamedTuple):
  text: str


class Code(NamedTuple):
  """Commands, one a line."""

  lines: tuple[str, ...]


class Table(NamedTuple):
  """Rows of texts; the first of each names its row. Cells refer to `notes` as [1], [2], .."""

  caption: str
  commands: tuple[str, ...]
  header: tuple[str, ...]
  rows: tuple[tuple[str, ...], ...]
  notes: tuple[str, ...] = ()


class Figure(NamedTuple):
  path: Path
  alt: str
  caption: str
  commands: tuple[str, ...]


class Folded(NamedTuple):
  """What is shown when its title is chosen."""

  title: str
  blocks: tuple[Block, ...]


Block = Heading | Paragraph | Code | Table | Figure | Folded


def to_html(title: str, blocks: Sequence[Block]) -> str:
  """One page that needs no other file and asks no server for any."""
  anchors = _anchors(blocks)
  contents = "".join(f'<li><a href="#{anchor}">{_inline(heading.text)}</a></li>'
                     for heading, anchor in anchors.items() if heading.level == 2)
  body = "\n".join(_html(block, anchors) for block in blocks)
  return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
          '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
          f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
          f"<header><h1>{html.escape(title)}</h1></header>\n"
          f'<nav aria-label="Contents"><ul>{contents}</ul></nav>\n<main>\n{body}\n</main>\n'
          "</body>\n</html>\n")


def _anchors(blocks: Iterable[Block]) -> dict[Heading, str]:
  found: dict[Heading, str] = {}
  for block in blocks:
    if isinstance(block, Heading):
      found[block] = re.sub(r"\W+", "-", block.text.lower()).strip("-")
  if len(set(found.values())) != len(found):
    raise ValueError(f"two headings share an anchor: {sorted(found.values())}")
  return found


def _html(block: Block, anchors: dict[Heading, str]) -> str:
  match block:
    case Heading(level, text):
      return f'<h{level} id="{anchors[block]}">{_inline(text)}</h{level}>'
    case Paragraph(text):
      return f"<p>{_inline(text)}</p>"
    case Code(lines):
      return f"<pre><code>{html.escape(chr(10).join(lines))}</code></pre>"
    case Table(caption, commands, header, rows, notes):
      label = html.escape(re.sub(r"[`*]", "", caption))
      head = "".join(f'<th scope="col">{_inline(cell)}</th>' for cell in header)
      return (f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table>'
              f"<caption><span>{_inline(caption)} {_inline(_made_by(commands))}</span></caption>"
              f"<thead><tr>{head}</tr></thead>\n<tbody>"
              + "\n".join(map(_html_row, rows)) + "</tbody></table></div>"
              + "".join(f'<p class="note">{_inline(note)}</p>' for note in _numbered(notes)))
    case Figure(path, alt, caption, commands):
      data = base64.b64encode(path.read_bytes()).decode()
      source = f"data:{_MEDIA[path.suffix]};base64,{data}"
      return (f'<figure><img alt="{html.escape(alt)}" src="{source}">'
              f"<figcaption>{_inline(caption)} {_inline(_made_by(commands))}</figcaption></figure>")
    case Folded(title, inner):
      return (f"<details><summary>{_inline(title)}</summary>\n"
              + "\n".join(_html(one, anchors) for one in inner) + "\n</details>")
  raise TypeError(f"no block: {block!r}")


def _numbered(notes: Sequence[str]) -> list[str]:
  return [f"[{index}] {note}" for index, note in enumerate(notes, 1)]


def _html_row(row: tuple[str, ...]) -> str:
  name, *cells = map(_inline, row)
  rest = "".join(f"<td>{cell}</td>" for cell in cells)
  return f'<tr><th scope="row">{name}</th>{rest}</tr>'


def _made_by(commands: Sequence[str]) -> str:
  return " and ".join(f"`{command}`" for command in commands)


def _inline(text: str) -> str:
  rendered, end = [], 0
  for match in _MARKUP.finditer(text):
    rendered.append(html.escape(text[end:match.start()]))
    bold, code = match.groups()
    rendered.append(f"<code>{html.escape(code)}</code>" if bold is None else
                    f"<strong>{_inline(bold)}</strong>")
    end = match.end()
  return "".join([*rendered, html.escape(text[end:])])


def to_markdown(title: str, blocks: Sequence[Block], folder: Path) -> str:
  """The same as text; figures are links to their files, as seen from `folder`."""
  return "\n\n".join([f"# {title}", *_markdown(blocks, folder)]) + "\n"


def _markdown(blocks: Iterable[Block], folder: Path) -> Iterator[str]:
  for block in blocks:
    match block:
      case Heading(level, text):
        yield f"{'#' * level} {_escape(text)}"
      case Paragraph(text):
        yield _escape(text)
      case Code(lines):
        yield "\n".join(["```bash", *lines, "```"])
      case Table(caption, commands, header, rows, notes):
        yield f"{_escape(caption)} {_made_by(commands)}"
        lines = [header, ("---",) * len(header), *rows]
        yield "\n".join("| " + " | ".join(_escape(cell).replace("|", "\\|") for cell in line) + " |"
                        for line in lines)
        yield from map(_escape, _numbered(notes))
      case Figure(path, alt, caption, commands):
        yield f"![{_escape(alt)}]({Path(os.path.relpath(path, folder)).as_posix()})"
        yield f"{_escape(caption)} {_made_by(commands)}"
      case Folded(title, inner):
        yield f"**{_escape(title)}**"
        yield from _markdown(inner, folder)


def _escape(text: str) -> str:
  """Outside code, stars that are no bold, angle brackets and links stand for themselves."""
  parts = re.split(r"(`[^`]*`|\*\*)", text)
  return "".join(part if index % 2 else re.sub(r"([*<_]|(?<=\])\()", r"\\\1", part)
                 for index, part in enumerate(parts))
