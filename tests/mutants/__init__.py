"""Mutants: small faults put into the package one at a time, each of which some test must notice.

    python -m tests.mutants                # or `make mutants`: all of them, about an hour on two cores; a table, and the survivors
    python -m tests.mutants 3 17           # those of these numbers
    python -m tests.mutants --of=replay    # those of files whose path has this text

`table.py` has a row a mutant: file, text, text in its place, what it breaks, and the tests that are to fail. The checkout's tracked
files are copied into a temporary folder, so the checkout is never touched. Quick tests alone are run (not those marked slow). A mutant
that no test notices is a promise that no test holds: write the test.
"""
