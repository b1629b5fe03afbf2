"""Who may import whom: the rooms of the package, what loads where JAX is absent, and who imports torch.

Imports inside functions count like the others: a late import hides an arrow and does not remove it.
"""

import ast
import graphlib
import sys
from pathlib import Path

import bapo_jax

PACKAGE = Path(bapo_jax.__file__).parent

# The house, lowest floor first: the rooms of a floor, which may import each other, and the rooms that they may import beside.
# A room is a folder of the package or a module at its top.
HOUSE = (
    ('groups', ''),
    ('files', ''),
    ('terminal', ''),
    ('output', ''),
    ('stopping', ''),
    ('cli', 'output stopping terminal'),
    ('hub', ''),
    ('events', 'terminal'),
    ('methods', 'files output'),
    ('models parallel', ''),  # one table of parameters: models reads it, parallel shards by it
    ('hosts', 'parallel'),
    ('seen', 'groups models'),
    ('scores', 'groups'),
    ('tasks', 'groups output terminal events hub'),
    ('prompts', 'groups'),
    ('replay', 'groups'),
    ('learner', 'groups hosts models parallel seen'),
    ('rollout', 'groups files output terminal cli hub events stopping hosts models parallel seen tasks prompts'),
    ('fields', 'terminal'),
    ('config_method', 'fields replay rollout'),
    ('config', 'fields methods tasks config_method'),
    ('run', 'groups files terminal events stopping hosts scores models parallel replay learner rollout config'),
    ('inputs', 'groups hub models tasks prompts config'),
    ('policies', 'models parallel rollout run'),
    ('bases', 'models tasks'),
    ('memory', 'learner models seen'),
    ('targets', 'parallel learner rollout'),
    ('advice', 'learner models parallel memory targets'),
)
COMMANDS = 'train ending evaluate export follow dry_run report buffers grade sample sft departures'  # the top floor, which may import everything


def module_name(path: Path) -> str:
    """rollout/engine.py -> 'bapo_jax.rollout.engine', rollout/__init__.py -> 'bapo_jax.rollout'."""
    parts = ('bapo_jax', *path.relative_to(PACKAGE).with_suffix('').parts)
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob('*.py')}


def room(module: str) -> str:
    """'bapo_jax.rollout.engine' -> 'rollout'; 'bapo_jax' -> ''."""
    return module.partition('.')[2].split('.')[0]


def imported(path: Path) -> set[str]:
    """Every module that a file names in an import, functions' own imports included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *({f'{node.module}.{alias.name}' for alias in node.names} & MODULES.keys())}
    return names


def of_package(path: Path) -> set[str]:
    """Those of them that are modules of the package."""
    return imported(path) & MODULES.keys() - {'bapo_jax'}


def top(names: set[str]) -> set[str]:
    return {name.split('.')[0] for name in names}


def test_a_floor_stands_on_lower_floors():
    below: list[str] = []
    for rooms, stands_on in HOUSE:
        assert set(stands_on.split()) <= set(below)
        below += rooms.split()
    assert sorted([*below, *COMMANDS.split()]) == sorted({room(module) for module in MODULES} - {''})  # each room has one place


def test_no_arrow_leads_up():
    may_import = {name: {*rooms.split(), *stands_on.split()} for rooms, stands_on in HOUSE for name in rooms.split()}
    upward = [
        f'{module} imports {other}'
        for module, path in MODULES.items()
        for other in of_package(path)
        if room(module) not in COMMANDS.split() and room(other) not in may_import.get(room(module), set())
    ]
    assert upward == []


def test_imports_form_no_circle():
    """Raises CycleError with the circle's modules."""
    graphlib.TopologicalSorter({module: of_package(path) for module, path in MODULES.items()}).prepare()


def test_credit_and_losses_are_arrays_in_arrays_out():
    """No config object, no model; of the package, credit imports groups alone and losses nothing."""
    credit, losses = (PACKAGE / 'learner' / file for file in ('credit.py', 'losses.py'))
    assert top(imported(credit)) - set(sys.stdlib_module_names) == {'numpy', 'bapo_jax'}
    assert of_package(credit) == {'bapo_jax.groups'}
    assert top(imported(losses)) - set(sys.stdlib_module_names) == {'jax'}


def test_one_file_alone_imports_vllm_and_torch():
    for foreign in ('vllm', 'torch'):
        importers = [p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob('*.py') if foreign in top(imported(p))]
        assert importers == ['rollout/worker.py']


def test_what_loads_in_the_servers_process_needs_neither_jax_nor_the_trainer():
    needed, waiting = set(), ['rollout/worker.py', 'rollout/token_guard.py', '__init__.py', 'rollout/__init__.py']
    for file in waiting:
        names = imported(PACKAGE / file)
        needed |= top(names) - set(sys.stdlib_module_names) - {'bapo_jax'}
        ours = {name.removeprefix('bapo_jax.').replace('.', '/') + '.py' for name in names if name.startswith('bapo_jax.')}
        waiting += [name for name in ours if name not in waiting]
    assert needed == {'numpy', 'ml_dtypes', 'torch', 'vllm'}


def test_the_buffer_is_numpy_alone():
    for path in (PACKAGE / 'replay').glob('*.py'):
        assert top(imported(path)) - set(sys.stdlib_module_names) <= {'numpy', 'bapo_jax'}
        ours = {name for name in imported(path) if name.startswith('bapo_jax')}
        assert all(name == 'bapo_jax.groups' or name.startswith('bapo_jax.replay.') for name in ours)
