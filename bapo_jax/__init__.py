"""BAPO (arXiv 2602.20722) in JAX. Imports no package: the rollout worker loads it where JAX may be absent."""

import os
import signal
import sys

__version__ = '0.1.0'  # the one place; pyproject.toml reads it

# Whatever imports transformers first would advise PyTorch, which the trainer does without.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

# What XLA notes of a step that does not fit, a dry run's own table says. XLA reads this when JAX is imported.
if any(word.startswith('--dry_run') for word in sys.argv):
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

# A command imports for seconds. Ctrl-C ends it there and then, without a traceback, and no library's callback can lose the signal.
# terminal.guard gives the signal back to Python. Elsewhere, in a notebook say, nothing changes.
_module = sys.orig_argv[sys.orig_argv.index('-m') + 1 :][:1] if '-m' in sys.orig_argv else []
_is_command = any(name.startswith('bapo_jax.') for name in _module) or os.path.basename((sys.argv or [''])[0]).startswith('bapo-')
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
