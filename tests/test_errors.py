"""How command lines end when something is wrong, or when nobody reads on."""

from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("end, status", [("", 141), ("sys.exit(1)", 141), ("1 / 0", 141)])
def test_output_that_nobody_reads_ends_the_program_quietly(end, status):
  program = ("import sys\nfrom damcha_jax.errors import until_nobody_reads\n"
             f"with until_nobody_reads():\n  print('line')\n  {end}\n")
  with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE) as process:
    process.stdout.close()
    assert process.stderr.read() == b""
  assert process.returncode == status


def test_every_command_of_the_library_may_be_cut_short():
  programs = [path.read_text(encoding="utf-8") for path in (ROOT / "damcha_jax").rglob("*.py")]
  ends = [text.partition('if __name__ == "__main__":\n')[2] for text in programs]
  ends = [end for end in ends if end]
  assert len(ends) >= 4
  assert all(end.startswith("  with until_nobody_reads():\n    sys.exit(main())") for end in ends)
