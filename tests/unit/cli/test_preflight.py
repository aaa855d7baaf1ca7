"""What is looked at before the start, and that each finding says what to do."""

from __future__ import annotations

import json
import struct
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from inflight.cli import installation, preflight
from inflight.cli.errors import StartupError
from inflight.cli.installation import STUB_NAME, TritonInstallation, find_installation
from inflight.cli.launch import check_first_python, server_command, server_environment
from inflight.cli.memory import available_memory, check_memory, number_of_weights
from inflight.cli.ports import Endpoints

LDD_LISTING = """\
\tlinux-vdso.so.1 (0x00007ffd5d1f2000)
\tlibcudart-0952.so.12 => /somewhere/nvidia_pytriton.libs/libcudart-0952.so.12 (0x00007f46)
\tlibpython3.12.so.1.0 => not found
\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f46)
\tlibarchive-3508.so.13 => not found
\t/lib64/ld-linux-x86-64.so.2 (0x00007f46)
"""


def test_missing_libraries_in_the_order_of_ldd() -> None:
    assert preflight.missing_libraries(LDD_LISTING) == [
        "libpython3.12.so.1.0",
        "libarchive-3508.so.13",
    ]
    assert preflight.missing_libraries("\tlibz.so.1 => /lib/libz.so.1 (0x1)\n") == []


def fake_ldd(directory: Path, script: str) -> dict[str, str]:
    program = directory / "ldd"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{directory}:/usr/bin:/bin"}


def test_a_missing_libpython_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "listing").write_text(LDD_LISTING)
    environment = fake_ldd(tmp_path, f"cat {tmp_path}/listing")
    monkeypatch.setenv("PATH", environment["PATH"])
    with pytest.raises(StartupError, match="needs libpython3.12.so.1.0, libarch.*apt-get install"):
        preflight.check_stub_libraries(tmp_path / STUB_NAME, environment)


def test_ldd_runs_in_the_environment_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = fake_ldd(tmp_path, 'echo "libx.so => ${LD_LIBRARY_PATH:-not found}"')
    monkeypatch.setenv("PATH", environment["PATH"])
    preflight.check_stub_libraries(tmp_path / STUB_NAME, {**environment, "LD_LIBRARY_PATH": "/x"})
    with pytest.raises(StartupError, match=r"libx\.so"):
        preflight.check_stub_libraries(tmp_path / STUB_NAME, environment)


def test_ldd_that_cannot_read_the_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = fake_ldd(tmp_path, "echo 'not a dynamic executable' >&2; exit 1")
    monkeypatch.setenv("PATH", environment["PATH"])
    with pytest.raises(StartupError, match="not a dynamic executable"):
        preflight.check_stub_libraries(tmp_path / STUB_NAME, environment)


def container_at(root: Path) -> TritonInstallation:
    backend = root / "backends" / "python"
    return TritonInstallation(root / "bin" / "tritonserver", backend, backend / STUB_NAME)


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_numpy_2_is_refused_with_every_stub_of_the_wheel(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "python_version", lambda: python)
    wheel = make_wheel(tmp_path)
    with pytest.raises(StartupError, match=r"numpy 2\.1\.0 does not work .*pip install 'numpy<2'"):
        preflight.check_numpy(wheel, "2.1.0")
    assert preflight.check_numpy(wheel, "1.26.4") is None


def test_numpy_2_in_a_container_depends_on_its_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "python_version", lambda: "3.12")
    assert preflight.check_numpy(container_at(tmp_path), "2.1.0") is None
    monkeypatch.setattr(preflight, "python_version", lambda: "3.10")
    with pytest.raises(StartupError, match="numpy 2"):
        preflight.check_numpy(container_at(tmp_path), "2.1.0")


def test_the_numpy_of_this_environment_fits() -> None:
    assert preflight.check_numpy(find_installation()) is None


def test_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 16 << 20))
    with pytest.raises(StartupError, match="16 MiB free, 32 MiB are needed: .*--shm-size"):
        preflight.check_shared_memory(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 33 << 20))
    assert preflight.check_shared_memory(tmp_path) is None


def test_no_shared_memory(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        preflight.check_shared_memory(tmp_path / "shm")


def test_model_repository(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no such folder"):
        preflight.check_model_repository(tmp_path / "nowhere")
    with pytest.raises(StartupError, match=r"no \*/config.pbtxt"):
        preflight.check_model_repository(tmp_path)
    (tmp_path / "ensemble").mkdir()
    (tmp_path / "ensemble" / "config.pbtxt").touch()
    assert preflight.check_model_repository(tmp_path) is None


def test_the_hint_names_what_is_missing() -> None:
    both = preflight.speed_hint(gpu=False, compiler=False)
    assert both is not None
    assert "CUDA GPU" in both and "C++ compiler" in both
    assert preflight.speed_hint(gpu=True, compiler=True) is None


def write_safetensors(file: Path, shapes: dict[str, list[int]]) -> None:
    tensors = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)


def test_weights_are_counted_over_all_shards(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", {"a": [1024, 1024], "b": [7]})
    write_safetensors(tmp_path / "model-2.safetensors", {"scalar": []})
    assert number_of_weights(tmp_path) == 1024 * 1024 + 7 + 1


def test_memory_for_the_weights_depends_on_dtype(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": [1 << 20]})
    assert check_memory(tmp_path, "bf16", available_bytes=2 << 20) is None
    with pytest.raises(StartupError, match="not enough memory: .*dtype fp32"):
        check_memory(tmp_path, "fp32", available_bytes=2 << 20)


def test_a_file_that_is_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(StartupError, match="not a safetensors file"):
        number_of_weights(tmp_path)


def test_this_machine_has_memory() -> None:
    assert (64 << 20) < available_memory() < (1 << 50)


def make_wheel(root: Path) -> TritonInstallation:
    for part in ("bin", "backends/python", f"python_backend_stubs/{installation.python_version()}"):
        (root / "tritonserver" / part).mkdir(parents=True)
    found = installation._in_wheel(root)
    for file in (
        found.server,
        found.stub,
        *(found.python_backend / f for f in installation.BACKEND_FILES),
    ):
        file.touch()
    return found


def test_the_backend_folder_is_assembled_from_links(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "pytriton")
    backends = wheel.backend_directory(tmp_path / "scratch")
    files = {file.name: file for file in (backends / "python").iterdir()}
    assert set(files) == {*installation.BACKEND_FILES, STUB_NAME}
    assert all(file.is_symlink() for file in files.values())
    assert files[STUB_NAME].resolve() == wheel.stub


def test_the_container_s_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    assert container_at(tmp_path).backend_directory(scratch) == tmp_path / "backends"
    assert not scratch.exists()


def test_a_python_without_a_stub(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "pytriton")
    wheel.stub.unlink()
    with pytest.raises(StartupError, match="no Python backend stub for Python 3"):
        installation._complete(wheel)


def test_the_wheel_of_this_environment_is_whole() -> None:
    found = find_installation()
    assert found.server.is_file() and found.stub.is_file()
    preflight.check_stub_libraries(found.stub, server_environment({}, None))


def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(StartupError, match="no tritonserver: pip install .*nvidia-pytriton"):
        find_installation()


def test_the_server_s_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    monkeypatch.chdir(tmp_path)
    environment = server_environment({"max_batch_size": "16"}, Path("my.yaml"))
    assert environment["INFLIGHT_MAX_BATCH_SIZE"] == "16"
    assert environment["INFLIGHT_CONFIG"] == str(tmp_path / "my.yaml")
    assert environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & set(environment)
    check_first_python(environment)


def test_another_python_first_on_path(tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    with pytest.raises(StartupError, match="would not find the package"):
        check_first_python({"PATH": str(tmp_path)})


def test_every_address_is_given_and_every_path_is_absolute(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "pytriton")
    command = server_command(wheel, Endpoints("127.0.0.1", 1, 2, 3), Path("repo"), Path("be"), "p_")
    assert command[0] == str(wheel.server)
    options = dict(word.removeprefix("--").split("=", 1) for word in command[1:])
    assert {options[f"{door}-address"] for door in ("http", "grpc", "metrics")} == {"127.0.0.1"}
    assert [options[f"{door}-port"] for door in ("http", "grpc", "metrics")] == ["1", "2", "3"]
    assert Path(options["model-repository"]).is_absolute()
    assert Path(options["backend-directory"]).is_absolute()
    assert options["backend-config"] == "python,shm-region-prefix-name=p_"
