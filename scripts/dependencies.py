"""Check installed dependencies without a network: conflicts, versions that the lock does not have, and licences.

`python scripts/dependencies.py` prints each package of the environment with its version and licence, and ends with 1 if
one conflicts with another, differs from `.ci/requirements*.txt`, or has a licence that is not in ALLOWED. It knows of
no vulnerabilities: the lists of these (OSV, PyPI's advisories, which pip-audit asks for) are services, and CI reaches
package registries only. Where they can be reached, `pip-audit -r .ci/requirements.txt` is the check to add.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PEERS = ("requirements-vllm.txt", "requirements-dynamo.txt")
"""Locks of environments of their own."""
LOCKS = [path for path in sorted((ROOT / ".ci").glob("requirements*.txt")) if path.name not in PEERS]

ALLOWED = re.compile(
    r"\b(MIT|MIT-CMU|MIT-0|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla Public License|Zlib|Unlicense"
    r"|CC0|HPND|public domain|BSL)\b",
    re.IGNORECASE,
)
"""Licences under which a dependency may be used and passed on beside code under Apache-2.0."""

OF_GPUS = re.compile(r"(nvidia|cuda)-")
"""What PyTorch's builds for GPUs install, under NVIDIA's own licence. kvarts passes nothing of it on."""

KNOWN = {"kvarts": "Apache-2.0"}
"""Licences of packages whose metadata names none."""


def licence_of(package: Distribution) -> str:
    """Return the licence that a package's metadata names, in one line; empty for none."""
    metadata: Any = package.metadata
    expression: str | None = metadata.get("License-Expression")
    if expression:
        return expression
    classifiers = [value for value in metadata.get_all("Classifier") or () if value.startswith("License :: ")]
    named: str = ", ".join(value.rpartition(" :: ")[2] for value in classifiers)
    first_line: str = (metadata.get("License") or "").strip().partition("\n")[0]
    return named or first_line or KNOWN.get(metadata["Name"].lower(), "")


def locked() -> dict[str, set[str]]:
    """Return the versions in the lock files, by normalised name."""
    versions: dict[str, set[str]] = {}
    for path in LOCKS:
        for name, version in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", path.read_text(), re.MULTILINE):
            versions.setdefault(normalised(name), set()).add(version)
    return versions


def normalised(name: str) -> str:
    """Return a package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def problems_of(packages: list[Distribution], versions: dict[str, set[str]]) -> list[str]:
    """Return what is wrong with the packages, a line each."""
    found = []
    for package in packages:
        name = normalised(package.metadata["Name"])
        if not OF_GPUS.match(name) and not ALLOWED.search(licence_of(package)):
            found.append(f"{name} {package.version}: {licence_of(package) or 'no licence'} is not an allowed licence")
        if name in versions and package.version not in versions[name]:
            found.append(f"{name} {package.version}: the lock has {', '.join(sorted(versions[name]))}")
    return found


def main() -> int:
    """Print all packages, and what is wrong."""
    by_name = {normalised(package.metadata["Name"]): package for package in distributions()}
    packages = [by_name[name] for name in sorted(by_name)]
    for package in packages:
        print(f"{package.metadata['Name']} {package.version}: {licence_of(package)}")
    problems = problems_of(packages, locked())
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    if check.returncode:
        problems += check.stdout.splitlines()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
