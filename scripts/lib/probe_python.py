"""Can this interpreter run the project? Exit code 0, or one line that says what it lacks.

Runs under whatever Python 3 is found, so it uses nothing that only newer ones have.
"""

import ctypes.util
import importlib.util
import os
import shutil
import sys
import sysconfig


def lacks() -> "str | None":
    """The reason, or None."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return "is Python %d.%d; 3.10 to 3.13 work" % sys.version_info[:2]
    version = "%d.%d" % sys.version_info[:2]
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            return "has no module %s (Debian: apt-get install python%s-venv)" % (module, version)
    if version == "3.13" and not can_compile():
        return (
            "has no numpy 1.26 that is already built, which the server's stubs need, and this "
            "machine has no C++ compiler and Python headers to build it "
            "(Debian: apt-get install g++ python3.13-dev)"
        )
    if not has_libpython(version):
        return "has no libpython%s.so.1.0 for the server (Debian: apt-get install libpython%s)" % (
            version,
            version,
        )
    return None


def can_compile() -> bool:
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    return os.path.exists(header) and bool(shutil.which("c++") or shutil.which("g++"))


def has_libpython(version: str) -> bool:
    if version == "3.13":
        return True  # the server's wheel brings its own
    name = "libpython%s.so.1.0" % version
    folders = [os.path.join(sys.base_prefix, "lib"), sysconfig.get_config_var("LIBDIR") or ""]
    if any(os.path.exists(os.path.join(folder, name)) for folder in folders):
        return True
    return ctypes.util.find_library("python" + version) is not None


if __name__ == "__main__":
    sys.exit(lacks())
