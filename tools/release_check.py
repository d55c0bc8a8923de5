"""Build wheel and sdist, check them, install the wheel in an empty environment, and run the first commands of a new
user there.

python tools/release_check.py [--keep FOLDER]     # or: make release-check

Prints the MB that are downloaded in addition to torch and its dependencies, and fails if they are more than 15.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_MB = 15.0
NEEDED = ("colonnade/py.typed", "colonnade/cli/gpt/train.py", "colonnade/cli/templates/parallelism.py.txt")


def run(*words: object, cwd: Path = ROOT) -> str:
    """Run a command and return its output; on failure, print all output and exit."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TORCH_DISTRIBUTED_DEBUG")}
    print("$", *(str(word).replace(str(cwd) + "/", "") for word in words), flush=True)
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nexit status {done.returncode}")
    return done.stdout


def build(folder: Path) -> Path:
    """The wheel, built from the sdist, both in order."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir())
    wheel = next(folder.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in NEEDED if name not in names]
    foreign = [name for name in names if not re.match(r"colonnade(/|-[^/]*\.dist-info/)", name)]
    if missing or foreign:
        sys.exit(f"{wheel.name}: missing {missing}, not ours {foreign}")
    return wheel


def megabytes_beside_torch(wheels: Path) -> float:
    """The wheels that a machine with torch downloads: all wheels except torch and its dependencies."""
    found = {}
    for file in wheels.glob("*.whl"):
        archive = zipfile.ZipFile(file)
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head = Parser().parsestr(archive.read(metadata).decode())
        plain = [entry for entry in head.get_all("Requires-Dist") or [] if "extra ==" not in entry]
        found[normal(head["Name"])] = (file, [normal(re.split(r"[\s;<>=!~\[(]", entry)[0]) for entry in plain])
    torchs: set[str] = set()
    waiting = ["torch"]
    while waiting:
        name = waiting.pop()
        if name in found and name not in torchs:
            torchs.add(name)
            waiting += found[name][1]
    ours = {name: file.stat().st_size / 1e6 for name, (file, _) in found.items() if name not in torchs}
    for name, size in sorted(ours.items(), key=lambda item: -item[1]):
        print(f"  {size:6.2f} MB  {name}")
    return sum(ours.values())


def normal(name: str) -> str:
    """Normalize the name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def first_minutes(python: Path, folder: Path) -> None:
    """Run the commands of a new user in an empty folder."""
    colonnade = python.with_name("colonnade")
    print(run(colonnade, "--version", cwd=folder), end="")
    print(run(colonnade, "doctor", cwd=folder), end="")
    print(run(colonnade, "demo", "--nproc", 2, "--steps", 20, cwd=folder), end="")
    print(run(colonnade, "ckpt", "ls", "colonnade-demo", cwd=folder), end="")
    print(run(colonnade, "explain", "C040", cwd=folder), end="")


def check(folder: Path) -> None:
    """Run all checks in `folder`."""
    wheel = build(folder / "dist")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    wheels = folder / "wheels"
    run(python, "-m", "pip", "download", "-q", "-d", wheels, "-c", ROOT / "constraints.txt", wheel)
    size = megabytes_beside_torch(wheels)
    print(f"{size:.1f} MB beside torch (at most {MOST_MB:.0f})")
    run(python, "-m", "pip", "install", "-q", "--no-index", "--find-links", wheels, wheel)
    empty = folder / "empty"
    empty.mkdir()
    first_minutes(python, empty)
    if size > MOST_MB:
        sys.exit("too much is downloaded")
    print("the release is in order")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="work in this new folder and leave it")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True)
        check(options.keep.resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="colonnade-release-") as temporary:
            check(Path(temporary))
