"""The command `bapo-methods`: prints each row, and how it differs from GRPO."""

from __future__ import annotations

from bapo_jax import methods
from bapo_jax.machine.help import CommandParser, columns, hanging
from bapo_jax.machine.output import ends_with_its_reader, open_streams
from bapo_jax.methods import METHODS, differs_from_grpo


def _in_words(name: str, width: int) -> str:
    """A row for the terminal: its summary and its fields by choice; * marks those that differ from GRPO."""
    row, differing = METHODS[name], differs_from_grpo(name)
    lines = [name, hanging(f'{row.summary} ({row.source})', width, '  ', '  ')]
    choices = {
        'which prompts': row.prompts,
        'which policy answers': row.schedule,
        'what is trained on': row.batch,
        'how it learns': row.learning,
    }
    for choice, fields in choices.items():
        said = (f'{"*" if f in differing else ""}{f.partition(".")[2]}={v}' for f, v in fields.items())
        whole = ' '.join(word.replace(', ', ',') for word in said)
        lines += [hanging(whole, width, f'  {choice:<22}', ' ' * 24)] if fields else []
    return '\n'.join(lines)


def run() -> None:
    """The command: prints the table."""
    open_streams()
    CommandParser(methods.__doc__).parse_args()
    with ends_with_its_reader():
        print(*(_in_words(name, columns()) for name in METHODS), '* differs from GRPO', sep='\n\n')


if __name__ == '__main__':
    run()
