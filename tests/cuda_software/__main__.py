"""Build the device: a virtual environment with torch's CUDA build, and our libraries where it looks for NVIDIA's.

python -m tests.cuda_software build --into DIR
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .stubs import build_stubs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STAMP = "cuda_software.json"
"""In site-packages: what the libraries were built as, which the loader compares."""
NOT_HERE = 3
"""Exit code where the device's wheels or compiler cannot be had."""
_SHARED = "nvidia/cu13/lib"
"""Where torch's RPATH looks, below site-packages."""


class Unavailable(Exception):
    """The wheels or the compiler that the device is made of cannot be had here."""


def build(into: Path) -> None:
    """Make the environment `into`, or bring it up to date.

    Raises:
        Unavailable: there is no compiler, or pip finds no such wheel.
        CalledProcessError: anything else that failed.
    """
    for tool in ("gcc", "g++", "nm", "readelf"):
        if shutil.which(tool) is None:
            raise Unavailable(f"no {tool} here (a C and C++ compiler with binutils is needed)")
    python = into / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", into], check=True)
    site, headers = Path(_ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))")), into / "headers"
    version = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    _pip(python, "install", f"torch==={version}", of_the_device=True)  # with == pip may take a build for the CPU
    _headers(python, headers)
    values = site / "cuda_software_values.so"
    compilation = _compile_values(site / "torch", headers, values.with_suffix(".o"))
    _pip(python, "install", "-r", HERE / "requirements.txt", "-c", ROOT / "constraints.txt")
    for of_nvidia in (site / "nvidia", *site.glob("nvidia_*.dist-info")):
        shutil.rmtree(of_nvidia, ignore_errors=True)
    libraries = build_stubs(site / "torch/lib", site / _SHARED, headers)
    _link_values(compilation, site / "torch", libraries[0], values)
    for name in ("cuda_software.py", "cuda_software.pth"):
        shutil.copy(HERE / "loader" / name, site)
    sizes = {str(path.relative_to(site)): path.stat().st_size for path in (*libraries, values)}
    (site / STAMP).write_text(json.dumps(sizes, indent=1))
    assert _ask(python, "import torch; print(torch.ones(2, device='cuda').sum().item())") == "2.0"


def _pip(python: Path, *words: object, of_the_device: bool = False) -> None:
    command = [str(word) for word in (python, "-m", "pip", words[0], "-q", "--no-deps", *words[1:])]
    ended = subprocess.run(command, capture_output=True, text=True)
    # The second is its answer where a constraints file of the machine names the package too.
    missing = re.search(r"(No matching distribution|Cannot install .* conflicting).*", ended.stderr)
    if ended.returncode and of_the_device and missing:
        raise Unavailable(f"pip: {missing[0]}")
    if ended.returncode:
        sys.stderr.write(ended.stderr)
        ended.check_returncode()


def _headers(python: Path, headers: Path) -> None:
    """The headers in NVIDIA's wheels, without their libraries."""
    wanted, done = (HERE / "headers.txt").read_text(), headers / "of"
    if done.exists() and done.read_text() == wanted:
        return
    wheels = headers / "wheels"
    _pip(python, "download", "-r", HERE / "headers.txt", "-d", wheels, of_the_device=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as content:
            for name in content.namelist():
                if (at := name.find("/include/")) >= 0 and not name.endswith("/"):
                    target = headers / name[at + len("/include/") :]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content.read(name))
    shutil.rmtree(wheels)
    done.write_text(wanted)


def _compile_values(torch: Path, headers: Path, into: Path) -> subprocess.Popen[bytes]:
    """Begin to compile what computes in place of kernels, which takes longest."""
    folders = (
        torch / "include", torch / "include/torch/csrc/api/include", HERE / "device", HERE / "device/shim", headers,
    )  # fmt: skip
    words = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", *(f"-I{folder}" for folder in folders)]
    return subprocess.Popen([*words, "-c", str(HERE / "device" / "values.cpp"), "-o", str(into)])


def _link_values(compilation: subprocess.Popen[bytes], torch: Path, device: Path, values: Path) -> None:
    if compilation.wait():
        raise subprocess.CalledProcessError(compilation.returncode, compilation.args)
    words = ["g++", "-shared", values.with_suffix(".o"), device, f"-L{torch / 'lib'}"]
    words += ["-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda", "-o", values]
    subprocess.run([str(word) for word in words], check=True)
    values.with_suffix(".o").unlink()


def _ask(python: Path, program: str) -> str:
    return subprocess.run([str(python), "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_software", description=__doc__)
    command = parser.add_subparsers(required=True).add_parser(
        "build", help="make the environment, or bring it up to date"
    )
    command.add_argument("--into", type=Path, required=True, metavar="DIR", help="the virtual environment")
    into = parser.parse_args().into.resolve()
    try:
        build(into)
    except Unavailable as reason:
        print(f"CUDA's software without a GPU: skipped, {reason}", file=sys.stderr)
        return NOT_HERE
    print(f"built: {into}/bin/python")
    return 0


if __name__ == "__main__":
    sys.exit(main())
