"""The fault harness: what a run survives, tried at random moments that a seed repeats.

    python -m tests.faults                     # or `make faults`: all suites; their tables go into docs/reference/operations.md
    python -m tests.faults servers             # one suite: kinds (of one trainer), servers (real vLLM), hosts (two trainers)
    python -m tests.faults kinds --only=killed
    python -m tests.faults --seed=7 --times=1  # other moments

Each injection takes a copy of a sound run at a random step, goes on, and is struck. Then the same command continues to the end. It
has survived if what it said names the fault, it ended with the status that it is to have, within ten seconds of its last word, the
ledger balances, and metrics and final weights equal the sound run's, bit for bit.
"""
