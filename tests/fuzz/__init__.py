"""Fuzzing: everything that parses what it did not write is fed with inputs that a seed repeats.

    python -m tests.fuzz                       # or `make fuzz`: a million inputs; the table goes into docs/reference/operations.md
    python -m tests.fuzz --only=countdown --inputs=20000
    python -m tests.fuzz --seed=7              # other inputs

An input is accepted, or refused by the error that its parser promises, which names what is wrong. Any other error is a crash, and
so is a time over the deadline. Inputs that once crashed something are in `corpus/TARGET.jsonl`, which is fed first.
"""
