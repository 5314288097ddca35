"""The image: content-addressed, minimal, without source; and what a machine without the rights says."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.environments import cgroups, doctor, image, launcher, seccomp
from etude.environments.backends.namespace import NamespaceBackend
from etude.environments.config import EnvironmentsConfig
from etude.environments.lease import PodLease
from etude.environments.pod import PodSpec
from etude.native import build
from etude.records.errors import BadInput, InfrastructureError, MissingCapability


@pytest.fixture(scope="session")
def built(pod_cache: Path) -> image.Image:
    return image.ensure_image(pod_cache)


def test_the_same_inputs_give_the_same_digest(built: image.Image, tmp_path: Path) -> None:
    other = image.ensure_image(tmp_path)
    assert other.digest == built.digest == image.image_digest(built.path) and other.path != built.path
    assert [path.name for path in (tmp_path / "images").iterdir()] == [built.digest]
    assert image.ensure_image(tmp_path) == other


def test_no_source_no_packages_no_history(built: image.Image) -> None:
    names = [path.relative_to(built.path) for path in built.path.rglob("*")]
    assert not [name for name in names if name.suffix == ".py" or "site-packages" in name.parts or ".git" in name.parts]
    assert not [name for name in names if "etude" in str(name)]
    modules = built.modules()
    for name in ("re", "json", "os", "sys", "math", "collections.abc", "_collections_abc", "ntpath", "site"):
        assert name in modules
    for name in ("textwrap", "difflib", "statistics", "shlex", "ctypes", "random", "subprocess"):
        assert name not in modules
    compiled = {name.stem for name in names if name.suffix == ".pyc" and "pod" not in name.parts}
    assert compiled - {"__init__"} <= {part for module in modules for part in module.split(".")}


@pytest.mark.pods
async def test_what_modules_says_is_what_imports_inside(backend: NamespaceBackend) -> None:
    modules = backend.image.modules()
    tried = sorted(name for name in modules if not name.startswith(("__", "xx")) and name != "antigravity")
    outside = ["textwrap", "ctypes", "subprocess", "numpy", "etude", "podagent", "threading"]
    script = f"""
import importlib, sys
good, bad = [], []
for name in {tried + outside!r}:
    try:
        importlib.import_module(name); good.append(name)
    except ImportError:
        bad.append(name)
import json
print(json.dumps([bad, [name for name in sys.modules if name not in {sorted(modules)!r}]]))
"""
    pod = await backend.create(PodSpec(files={"all.py": script.encode()}))
    for argv in (["python", "all.py"], ["python", "-c", "exec(open('all.py').read())"]):
        done = await pod.exec(argv)
        bad, unknown = json.loads(done.stdout)
        assert bad == outside and set(unknown) <= {"__main__", "typing.io", "typing.re"}


async def test_missing_rights_say_in_one_line_what_to_enable(pod_cache: Path) -> None:
    def probe(found: launcher.Launcher, built: image.Image) -> str:
        return "podlaunch: clone with new namespaces: Operation not permitted"

    with pytest.raises(MissingCapability) as caught:
        await NamespaceBackend.open(pod_cache, probe=probe)
    told = str(caught.value)
    assert "Operation not permitted" in told and "run as root" in told and "--privileged" in told and "\n" not in told
    check = doctor.check_rights(pod_cache, probe)
    assert not check.ok and check.needed and "run as root" in check.fix


def test_without_a_compiler_the_python_launcher_serves_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    found = launcher.find_launcher(tmp_path)
    assert found.program[-1].endswith("podlaunch.py") and "install a C compiler" in found.notices[0]
    with pytest.raises(MissingCapability, match="gcc"):
        launcher.find_launcher(tmp_path, "c")


@pytest.fixture
def nobodys_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="etude-pods-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.pods
@pytest.mark.parametrize("kind", ["c", "python"])
async def test_a_plain_user_gets_pods_in_a_user_namespace(
    backend: NamespaceBackend, root_only: None, nobodys_folder: Path, kind: str
) -> None:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("needs setpriv")
    shutil.copytree(backend.image.path, nobodys_folder / "images" / backend.image.digest, symlinks=True)
    found = launcher.find_launcher(nobodys_folder, "c")
    program = found.program
    if kind == "python":  # an interpreter that this user may run, and a copy of the launcher that it may read
        shutil.copy(launcher.PYTHON_TWIN, nobodys_folder / "twin-podlaunch.py")
        program = ("/usr/bin/python3", "-I", "-S", str(nobodys_folder / "twin-podlaunch.py"))
        if not Path(program[0]).exists():
            pytest.skip("needs a system Python")
    for folder, directories, files in os.walk(nobodys_folder):
        for name in (".", *directories, *files):
            os.chown(Path(folder) / name, 65534, 65534, follow_symlinks=False)
    as_nobody = (setpriv, "--reuid=65534", "--regid=65534", "--clear-groups")
    changed = dataclasses.replace(found, program=(*as_nobody, *program), user_namespace=True)
    told = launcher.probe_launch(changed, backend.image)
    if told:
        pytest.skip(f"no user namespaces here: {told}")
    plain = NamespaceBackend(backend.image, changed, None)
    try:
        pod = await plain.create(PodSpec(files={"check.py": b"print('ok')"}, memory_bytes=64 << 20))
        assert (await pod.call("run", {}))["text"] == "ok"
        status = (await pod.exec(["cat", "/proc/self/status"])).text()
        assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
        assert not (await pod.exec(["cat", "/proc/1/maps"])).ok
        assert (await pod.exec(["sh", "-c", "echo x > /dev/null; cat /dev/zero | head -c 3"])).stdout == b"\0\0\0"
        bomb = await pod.exec(["python", "-c", "x = bytearray(200 << 20)"])
        assert bomb.exit_code == 1 and b"MemoryError" in bomb.stderr
        assert not plain.capabilities.memory_limit and plain.capabilities.notices
    finally:
        await plain.aclose()


async def test_wrong_specs_are_bad_input(pod_cache: Path, backend: NamespaceBackend) -> None:
    for spec in (PodSpec(image="ubuntu"), PodSpec(workdir="repo"), PodSpec(workdir="/"), PodSpec(workdir="/a/../..")):
        with pytest.raises(BadInput):
            await backend.create(spec)
    assert backend.lease.held == 0


def test_a_cache_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="writable"):
        image.ensure_image(tmp_path / "file" / "cache")


def test_the_filter_is_well_formed_on_both_architectures() -> None:
    for machine in ("x86_64", "aarch64"):
        code = seccomp.filter_bytes(machine)
        count = len(code) // 8
        assert len(code) % 8 == 0 and count < 4096
        for at in range(count):
            kind, true, false = int.from_bytes(code[8 * at : 8 * at + 2], "little"), code[8 * at + 2], code[8 * at + 3]
            assert at + 1 + max(true, false) < count or kind == seccomp.RETURN
    with pytest.raises(MissingCapability, match="x86_64 or aarch64"):
        seccomp.filter_bytes("mips")


def test_control_groups_of_both_versions_are_found(tmp_path: Path) -> None:
    def machine(cgroup: str, mounts: str, folders: list[str], control: str = "") -> cgroups.CgroupTree | None:
        process = tmp_path / str(len(list(tmp_path.iterdir())))
        process.mkdir()
        for folder in folders:
            (process / folder).mkdir(parents=True)
            (process / folder / "cgroup.procs").write_text("")
            (process / folder / "cgroup.subtree_control").write_text(control)
        (process / "cgroup").write_text(cgroup)
        (process / "mountinfo").write_text(mounts.replace("ROOT", str(process)))
        return cgroups.find_tree(process)

    one = machine(
        "4:memory:/box/a\n2:cpu,cpuacct:/\n1:pids:/none\n",
        "1 0 0:1 / ROOT/memory rw - cgroup cgroup rw,memory\n2 0 0:2 / ROOT/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
        ["memory/box/a", "cpu"],
    )
    assert one is not None and one.version == 1 and set(one.parents) == {"memory", "cpu"}
    plan = one.plan("p", memory_bytes=5, processes=3, cpus=0.5)
    assert f"set={one.parents['memory']}/p/memory.limit_in_bytes:5" in plan.options()
    two = machine("0::/own\n", "1 0 0:1 / ROOT rw - cgroup2 none rw\n", ["own"], "cpu memory pids")
    assert two is not None and two.version == 2 and len(set(two.parents.values())) == 1
    options = two.plan("p", memory_bytes=5, processes=3, cpus=0.5).options()
    assert sum(option.startswith("cgroup=") for option in options) == 1 and any(
        option.endswith("cpu.max:50000 100000") for option in options
    )
    assert machine("0::/own\n", "1 0 0:1 / ROOT rw - cgroup2 none rw\n", ["own"], "hugetlb") is None


async def test_lease_counts_and_is_fair() -> None:
    lease = PodLease(1)
    await lease.acquire(1)
    with pytest.raises(InfrastructureError, match="1 of 1"):
        await lease.acquire(0.01)
    lease.release()
    await lease.acquire(1)
    assert (lease.held, lease.waiting, lease.peak) == (1, 0, 1)
    with pytest.raises(ValueError):
        PodLease(0)


def test_doctor_names_what_is_wrong_and_what_to_do(
    pod_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = doctor.diagnose(pod_cache)
    assert {check.name for check in checks} >= {"disk", "compiler", "cgroups", "pods"}
    assert all(check.ok or check.fix for check in checks)
    assert not doctor.check_disk(tmp_path, 1 << 60).ok
    (tmp_path / "file").write_text("")
    assert "writable" in doctor.check_disk(tmp_path / "file" / "x").fix
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        check = doctor.check_port(busy.getsockname()[1])
        assert not check.ok and "another port" in check.fix
    monkeypatch.setattr(doctor, "compiler", lambda: None)
    assert "gcc" in doctor.check_compiler().fix


def test_groups_of_hosts_that_are_gone_are_swept(tmp_path: Path) -> None:
    tree = cgroups.CgroupTree(2, {"memory": tmp_path})
    gone, ours, fresh = (tmp_path / f"etude-{host}-1-1" for host in (99999999, os.getpid(), 99999998))
    for folder in (gone, ours, fresh):
        folder.mkdir()
    for folder in (gone, ours):
        os.utime(folder, (1, 1))
    assert tree.sweep() == [gone] and ours.exists() and fresh.exists()


@pytest.mark.pods
async def test_config_opens_a_backend_with_its_limits(backend: NamespaceBackend, pod_cache: Path) -> None:
    config = EnvironmentsConfig(cache=pod_cache, max_pods=2, disk_bytes=8 << 20, cpus=0.5)
    opened = await config.open()
    assert isinstance(opened, NamespaceBackend) and opened.lease.limit == 2
    spec = config.spec({"x": b""}, processes=5)
    assert (spec.disk_bytes, spec.cpus, spec.processes) == (8 << 20, 0.5, 5)
    await opened.aclose()


def test_config_refuses_what_it_does_not_know() -> None:
    assert EnvironmentsConfig().backend == "namespace"
    with pytest.raises(ValueError):
        EnvironmentsConfig.model_validate({"pods": 3})
