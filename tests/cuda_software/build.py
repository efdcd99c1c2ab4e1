"""Build the device: a virtual environment with torch's CUDA build, and our libraries where it looks for NVIDIA's."""

from __future__ import annotations

import json
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
    site = Path(_ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    pins = dict(
        line.split("==", 1) for line in (HERE / "pins.txt").read_text().splitlines() if "==" in line and line[0] != "#"
    )
    torch = f"torch==={pins['torch'].lstrip('=')}"
    headers = into / "headers"
    _fetch(python, "install", torch)
    for name in ("nvidia-cuda-runtime", "nvidia-nccl-cu13"):
        _headers(python, f"{name}=={pins[name]}", headers)
    _pip(python, "install", "-r", HERE / "requirements.txt", "-c", ROOT / "constraints.txt")
    shutil.rmtree(site / "nvidia", ignore_errors=True)
    libraries = build_stubs(site / "torch/lib", site / _SHARED, headers)
    values = site / "cuda_software_values.so"
    _build_values(site / "torch", headers, libraries[0], values)
    for name in ("cuda_software.py", "cuda_software.pth"):
        shutil.copy(HERE / "loader" / name, site)
    sizes = {str(path.relative_to(site)): path.stat().st_size for path in (*libraries, values)}
    (site / STAMP).write_text(json.dumps(sizes, indent=1))


def _pip(python: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in (python, "-m", "pip", words[0], "-q", "--no-deps", *words[1:])]
    return subprocess.run(command, check=True, capture_output=True, text=True)


def _fetch(python: Path, *words: object) -> None:
    try:
        _pip(python, *words)
    except subprocess.CalledProcessError as error:
        if "No matching distribution found" in error.stderr:
            raise Unavailable(f"pip finds no {words[1]}") from None
        sys.stderr.write(error.stderr)
        raise


def _headers(python: Path, package: str, headers: Path) -> None:
    """The headers of one of NVIDIA's wheels, without its libraries."""
    done = headers / (package.replace("==", "-") + ".done")
    if done.exists():
        return
    wheels = headers / "wheels"
    _fetch(python, "download", package, "-d", wheels)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as content:
            for name in content.namelist():
                if (at := name.find("/include/")) >= 0 and not name.endswith("/"):
                    target = headers / name[at + len("/include/") :]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content.read(name))
    shutil.rmtree(wheels)
    done.touch()


def _build_values(torch: Path, headers: Path, device: Path, values: Path) -> None:
    """The extension that computes what kernels would."""
    source = HERE / "device" / "values.cpp"
    include = [
        torch / "include",
        torch / "include/torch/csrc/api/include",
        HERE / "device",
        HERE / "device/shim",
        headers,
    ]
    words = [
        "g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *(f"-I{folder}" for folder in include), source, device,
        f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda", "-o", values,
    ]  # fmt: skip
    subprocess.run([str(word) for word in words], check=True)


def _ask(python: Path, program: str) -> str:
    return subprocess.run([str(python), "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
