"""BAPO (arXiv 2602.20722) in JAX.

It imports no package, since the rollout worker loads it in environments that may lack JAX.
"""

import os
import signal
import sys

__version__ = '0.1.0'  # pyproject.toml reads this

# On import, transformers advises installing PyTorch, which the trainer does not need.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

# A dry run's table says what XLA logs about a step that does not fit. XLA reads this when JAX is imported.
if any(word.startswith('--dry_run') for word in sys.argv):
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

# The imports of a command take seconds. During them, Ctrl-C ends the process at once, without a traceback,
# and no library's callback can lose the signal. terminal.guard returns the signal to Python. In other
# processes, such as a notebook, nothing changes.
_module = sys.orig_argv[sys.orig_argv.index('-m') + 1 :][:1] if '-m' in sys.orig_argv else []
_is_command = any(name.startswith('bapo_jax.') for name in _module) or os.path.basename(
    (sys.argv or [''])[0]
).startswith('bapo-')
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
