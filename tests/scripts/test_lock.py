"""The lock of CI has what the project asks for, each with hashes; and what is bundled is listed with its licence."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from dependencies import locked, normalised  # noqa: E402
from lock import NOT_LOCKED  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def asked() -> list[Requirement]:
    """What the project and the extras that CI installs ask for, other extras of the project left out."""
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *extras["torch"], *extras["dev"]]
    texts += [text for name in ("calibrate", "grpc", "parquet", "serve") for text in extras[name]]
    return [each for each in map(Requirement, texts) if each.name != "kvarts"]


def test_each_requirement_is_locked_at_a_version_that_it_allows() -> None:
    versions = locked()
    for requirement in asked():
        if NOT_LOCKED.match(requirement.name):
            assert len(requirement.specifier) == 1 and str(requirement.specifier).startswith("==")
            continue
        found = versions[normalised(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in found), (requirement, found)


def test_each_locked_package_has_hashes_and_torch_is_not_among_them() -> None:
    for name in ("requirements.txt", "requirements-torch.txt"):
        text = (ROOT / ".ci" / name).read_text()
        packages = re.split(r"^(?=\S+==)", text, flags=re.MULTILINE)[1:]
        assert packages
        for package in packages:
            assert not NOT_LOCKED.match(package), package[:40]
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), package[:80]


def test_what_is_bundled_is_listed_with_its_licence() -> None:
    listed = (ROOT / "THIRD_PARTY.md").read_text()
    paths = [Path(path) for path in re.findall(r"`(src/kvarts/[^`]+)`", listed)]
    assert all((ROOT / path).exists() for path in paths), paths
    ours = {
        "README.md",
        "charts.js",
        *(f"{page}.{kind}" for page in ("live", "lines", "report") for kind in ("css", "html", "js")),
    }
    for folder in ("src/kvarts/data", "src/kvarts/sim/report/assets"):
        for path in (ROOT / folder).rglob("*"):
            relative = path.relative_to(ROOT)
            if path.is_file() and path.name not in ours and "__pycache__" not in path.parts:
                assert any(relative == each or each in relative.parents for each in paths), relative
