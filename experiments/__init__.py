"""The paper's experiments, one module per family: flags, config, the call, the table."""

import signal
import sys

# While `python -m experiments.NAME` still imports, nothing has begun that Ctrl-C could spoil, and
# the traceback of a half-imported package tells nothing. Later `command_line.user_errors` answers it.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, signal.SIG_DFL)
