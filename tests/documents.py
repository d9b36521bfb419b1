"""The README and the documents in `docs/`, for tests of what they say."""

from pathlib import Path
import re

ROOT = Path(__file__).parents[1]
TEXTS = {path.name: path.read_text(encoding="utf-8")
         for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def blocks(language: str, name: str) -> list[str]:
  """The code between fences of a document."""
  return re.findall(rf"```{language}\n(.*?)```", TEXTS[name], flags=re.DOTALL)
