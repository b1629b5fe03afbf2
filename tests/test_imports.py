"""Who may import whom: what keeps the trainer free of torch and vLLM, and the server's side free of JAX."""

import ast
import sys
from pathlib import Path

import bapo_jax

PACKAGE = Path(bapo_jax.__file__).parent


def imported(path: Path) -> set[str]:
    """Every module that a file names in an import, functions' own imports included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def top(names: set[str]) -> set[str]:
    return {name.split('.')[0] for name in names}


def test_one_file_alone_imports_vllm_and_torch():
    for foreign in ('vllm', 'torch'):
        assert [p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob('*.py') if foreign in top(imported(p))] == ['rollout/worker.py']


def test_what_loads_in_the_servers_process_needs_neither_jax_nor_the_trainer():
    needed, waiting = set(), ['rollout/worker.py', 'rollout/token_guard.py', '__init__.py', 'rollout/__init__.py']
    for file in waiting:
        names = imported(PACKAGE / file)
        needed |= top(names) - set(sys.stdlib_module_names) - {'bapo_jax'}
        ours = {name.removeprefix('bapo_jax.').replace('.', '/') + '.py' for name in names if name.startswith('bapo_jax.')}
        waiting += [name for name in ours if name not in waiting]
    assert needed == {'numpy', 'ml_dtypes', 'tensorstore', 'torch', 'vllm'}


def test_the_buffer_is_numpy_alone():
    for path in (PACKAGE / 'replay').glob('*.py'):
        assert top(imported(path)) - set(sys.stdlib_module_names) <= {'numpy', 'bapo_jax'}
        ours = {name for name in imported(path) if name.startswith('bapo_jax')}
        assert all(name == 'bapo_jax.groups' or name.startswith('bapo_jax.replay.') for name in ours)
