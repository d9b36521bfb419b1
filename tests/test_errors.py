"""How command lines end when something is wrong, or when nobody reads on."""

import os
from pathlib import Path
import signal
import subprocess
import sys

import jax
import pytest

from experiments import command_line

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


def test_an_interrupt_while_python_imports_ends_the_program_quietly(tmp_path):
  (tmp_path / "jax.py").write_text(
      "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)\n")
  # Started by a program that heeds SIGINT, which a shell's background job ignores. `preexec_fn` would
  # fork this process, of which JAX warns.
  start = ("import os, signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
           "os.execv(sys.executable, [sys.executable, '-m', 'experiments.gpt2_enwik8'])\n")
  done = subprocess.run(
      [sys.executable, "-c", start], cwd=ROOT, check=False,
      env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True)
  assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("error", [
    MemoryError("Unable to allocate 9 TiB"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")])
def test_too_little_memory_is_one_line(capsys, error):
  with pytest.raises(SystemExit) as stopped, command_line.user_errors():
    raise error
  line = capsys.readouterr().err
  assert stopped.value.code == 1 and line.count("\n") == 1
  assert "not enough memory" in line and str(error) in line


def test_another_error_of_jax_is_left_alone():
  with pytest.raises(jax.errors.JaxRuntimeError), command_line.user_errors():
    raise jax.errors.JaxRuntimeError("INTERNAL: a fault of the program")


def test_every_command_of_the_library_may_be_cut_short():
  programs = [path.read_text(encoding="utf-8") for path in (ROOT / "damcha_jax").rglob("*.py")]
  ends = [text.partition('if __name__ == "__main__":\n')[2] for text in programs]
  ends = [end for end in ends if end]
  assert len(ends) >= 4
  assert all(end.startswith("  with until_nobody_reads():\n    sys.exit(main())") for end in ends)
