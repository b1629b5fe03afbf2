"""Who may import whom: the rooms of the package, what loads where JAX is absent, and who imports torch.

Imports inside functions count like the others: a late import hides an arrow and does not remove it.
"""

import ast
import graphlib
import re
import sys
from pathlib import Path

import bapo_jax

PACKAGE = Path(bapo_jax.__file__).parent

# The house, lowest floor first: the rooms of a floor, which may import each other, and the rooms that they may import beside.
# A room is a folder of the package or a module at its top.
HOUSE = (
    ('machine', ''),
    ('groups', ''),
    ('own', 'machine'),
    ('methods', 'machine'),
    ('cluster', 'machine'),
    ('models', 'machine groups cluster'),
    ('weights', 'machine cluster models'),
    ('scores', 'groups'),
    ('tasks', 'machine groups own'),
    ('prompts', 'groups'),
    ('replay', 'groups own'),
    ('learner', 'groups own cluster models'),
    ('rollout', 'machine groups cluster models weights tasks prompts'),
    ('config', 'machine own methods replay rollout tasks'),
    ('inputs', 'machine groups models tasks prompts config'),
    ('run', 'machine groups cluster scores models weights replay learner rollout config tasks inputs'),
    ('policies', 'machine cluster models weights rollout run'),
)
COMMANDS = 'train command evaluate export follow dry_run report buffers compare grade sample show'  # the top floor, which may import everything


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
    """No config object, no model; of the package, credit imports groups alone, trust that and credit, and losses nothing."""
    credit, losses, trust = (PACKAGE / 'learner' / file for file in ('credit.py', 'losses.py', 'trust.py'))
    assert top(imported(credit)) - set(sys.stdlib_module_names) == {'numpy', 'bapo_jax'}
    assert of_package(credit) == {'bapo_jax.groups'}
    assert top(imported(trust)) - set(sys.stdlib_module_names) == {'numpy', 'bapo_jax'}
    assert of_package(trust) == {'bapo_jax.groups', 'bapo_jax.learner.credit'}
    assert top(imported(losses)) - set(sys.stdlib_module_names) == {'jax'}


def test_one_file_alone_imports_vllm_and_torch():
    for foreign in ('vllm', 'torch'):
        importers = [p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob('*.py') if foreign in top(imported(p))]
        assert importers == ['rollout/vllm/worker.py']


def test_what_loads_in_the_servers_process_needs_neither_jax_nor_the_trainer():
    needed, waiting = set(), ['rollout/vllm/worker.py', 'rollout/vllm/token_guard.py', '__init__.py', 'rollout/__init__.py', 'rollout/vllm/__init__.py', 'weights/__init__.py']
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
        assert all(name in ('bapo_jax.groups', 'bapo_jax.replay') or name.startswith(('bapo_jax.replay.', 'bapo_jax.own.')) for name in ours)


# Files that play one role, one in place of the other, and so share names: the kernels of an engine or a learner, and a task's files,
# of which those of the task itself have the names of its contract (tasks/__init__.py).
ALTERNATIVES = (
    r'rollout/inprocess/(gpu_)?decoding\.py',
    r'rollout/inprocess/(gpu_)?drawing\.py',
    r'models/(gpu|cudnn)_attention\.py',
    r'tasks/(arithmetic|questions|\w+/(task|problems|answers))\.py',
)
COMMAND = {'FLAGS', 'main', 'run'}  # of a command, which is found by its module


def public_names(path: Path) -> set[str]:
    """What a module defines for others at its top."""
    names = set()
    for node in ast.parse(path.read_text('utf-8')).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return {name for name in names if not name.startswith('_')}


def test_a_name_means_one_thing_in_the_whole_package():
    places: dict[str, set[str]] = {}
    for path in MODULES.values():
        file = path.relative_to(PACKAGE).as_posix()
        role = next((role for role in ALTERNATIVES if re.fullmatch(role, file)), file)
        for name in public_names(path) - COMMAND:
            places.setdefault(name, set()).add(role)
    assert {name: sorted(files) for name, files in places.items() if len(files) > 1} == {}


def test_no_module_is_long():
    assert [name for name, path in MODULES.items() if len(path.read_text('utf-8').splitlines()) > 350] == []


def test_no_line_is_long():
    configs = (PACKAGE.parent / 'configs').rglob('*.py')
    lines = [(path.name, line) for path in [*MODULES.values(), *configs] for line in path.read_text('utf-8').splitlines()]
    assert [(name, line) for name, line in lines if len(line) > 110] == []


def test_the_loop_stays_on_a_screen_and_the_top_of_the_package_in_sight():
    train = (PACKAGE / 'train.py').read_text('utf-8')
    names = [alias for node in ast.walk(ast.parse(train)) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    assert len(train.splitlines()) <= 170 and len(names) <= 25
    assert len(list(PACKAGE.glob('*.py'))) <= 14
