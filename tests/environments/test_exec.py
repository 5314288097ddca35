"""Running programs in a pod: outcomes, streams, timeouts. The numbers name the public faults of the notes that a test repeats."""

from __future__ import annotations

import asyncio
import time

import pytest

from etude.environments.backends.namespace import NamespaceBackend
from etude.environments.client import AgentPod
from etude.environments.pod import PodRefused, PodSpec
from etude.records.errors import PodLost

pytestmark = pytest.mark.pods


async def test_exit_code_signal_and_streams_are_told_apart(pod: AgentPod) -> None:
    good, bad, killed = await asyncio.gather(
        pod.exec(["sh", "-c", "echo out; echo err >&2"]),
        pod.exec(["sh", "-c", "exit 7"]),
        pod.exec(["sh", "-c", "kill -9 $$"]),
    )
    assert (good.exit_code, good.signal, good.stdout, good.stderr, good.ok) == (0, None, b"out\n", b"err\n", True)
    assert (bad.exit_code, bad.signal, bad.timed_out, bad.out_of_memory) == (7, None, False, False)
    assert (killed.exit_code, killed.signal) == (None, 9)


async def test_program_or_folder_that_is_not_there_is_a_named_error(pod: AgentPod) -> None:
    for argv, cwd in ((["no-such-program"], None), (["true"], "/no/such/folder")):
        with pytest.raises(PodRefused) as caught:
            await pod.exec(argv, cwd=cwd)
        assert caught.value.error == "not_found"
    with pytest.raises(PodRefused) as caught:
        await pod.exec(["/etc/passwd"])
    assert caught.value.error == "not_allowed"
    assert (await pod.exec(["true"])).ok


async def test_environment_and_folder_are_the_ones_asked_for(backend: NamespaceBackend) -> None:
    pod = await backend.create(PodSpec(env={"A": "1"}, hostname="studio", files={"d/x": b""}))
    done = await pod.exec(["sh", "-c", "echo $A $B; pwd; cat /proc/sys/kernel/hostname"], env={"B": "2"}, cwd="d")
    assert done.stdout == b"1 2\n/repo/d\nstudio\n"


SURVIVOR = """
import os, sys, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.environ.clear()
            sys.stdout.write('born\\n'); sys.stdout.flush()
            time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


async def test_timeout_kills_the_whole_tree_and_keeps_the_output(
    backend: NamespaceBackend,
) -> None:  # 9.1, 9.4, 9.9; tools 14, 15
    pod = await backend.create(PodSpec(files={"survivor.py": SURVIVOR.encode()}))
    for argv in (
        ["python", "survivor.py"],
        ["python", "-u", "survivor.py"],
        ["sh", "-c", "echo born; (setsid sleep 60 &) ; sleep 60 & sleep 60"],
    ):
        started = time.monotonic()
        done = await pod.exec(argv, timeout_s=0.8)
        assert done.timed_out and not done.ok
        assert b"born" in done.stdout
        assert time.monotonic() - started < 3
        left = await pod.processes()
        assert left.pids == [] and left.zombies == 0
    assert (await pod.exec(["true"])).ok


async def test_timeout_spares_other_running_programs(pod: AgentPod) -> None:  # tools 17
    handle = await pod.start(["sh", "-c", "echo up; sleep 60 & wait"])
    beside = asyncio.create_task(pod.exec(["sh", "-c", "sleep 1; echo done"]))
    done = await pod.exec(["sh", "-c", "sleep 60 & setsid sleep 60"], timeout_s=0.4)
    assert done.timed_out
    running, so_far = await pod.attach(handle)
    assert running and so_far.stdout == b"up\n"
    assert (await beside).stdout == b"done\n"
    await pod.signal(handle, 9)
    for _ in range(100):
        if not (await pod.processes()).pids:
            break
        await asyncio.sleep(0.02)
    assert (await pod.processes()).pids == []
    assert not (await pod.attach(handle))[0]


async def test_result_comes_at_the_leaders_exit_though_a_child_holds_the_pipes(
    pod: AgentPod,
) -> None:  # 9.3, 9.5; tools 16
    started = time.monotonic()
    done = await pod.exec(["sh", "-c", "sleep 8 & echo first"], timeout_s=5)
    assert done.ok and done.stdout == b"first\n"
    assert time.monotonic() - started < 2
    assert len((await pod.processes()).pids) == 1
    await pod.exec(["sh", "-c", "(while :; do echo noise; done) &"], timeout_s=5)
    assert (await pod.exec(["echo", "still here"])).stdout == b"still here\n"
    await pod.signal("all", 9)


async def test_ten_megabytes_on_both_streams_at_once(pod: AgentPod) -> None:  # 9.6, 9.8, 9.13
    size = 10_000_000
    script = f"head -c {size} /dev/zero | tr '\\0' a & head -c {size} /dev/zero | tr '\\0' b >&2; wait"
    whole = await pod.exec(["sh", "-c", script], output_limit=12_000_000, timeout_s=20)
    assert whole.stdout == b"a" * size and whole.stderr == b"b" * size
    assert whole.dropped_stdout == whole.dropped_stderr == 0
    cut = await pod.exec(["sh", "-c", f"echo head; {script}; echo tail"], output_limit=1000, timeout_s=20)
    assert len(cut.stdout) == 1000 and cut.stdout.startswith(b"head\naaa") and cut.stdout.endswith(b"aaatail\n")
    assert cut.dropped_stdout == size + 10 - 1000 and cut.dropped_stderr == size - 1000
    assert f"[{cut.dropped_stdout} bytes dropped]" in cut.text()


async def test_bytes_that_are_no_text_are_kept(pod: AgentPod) -> None:  # 9.11; tools 13
    every = bytes(range(256))
    assert (await pod.exec(["cat"], stdin=every)).stdout == every
    assert "\ufffd" in (await pod.exec(["cat"], stdin=b"\xff")).text()


async def test_stdin_is_empty_unless_given(pod: AgentPod) -> None:  # 9.14, 9.15
    started = time.monotonic()
    assert (await pod.exec(["cat"], timeout_s=5)).ok
    assert time.monotonic() - started < 2


async def test_big_stdin_flows_both_ways(pod: AgentPod) -> None:  # 9.16
    data = bytes(20_000_000)
    done = await pod.exec(["cat"], stdin=data, output_limit=21_000_000, timeout_s=20)
    assert done.stdout == data
    assert (await pod.exec(["true"], stdin=data, timeout_s=5)).ok  # a reader that does not read


async def test_channel_travels_apart_from_the_output(pod: AgentPod) -> None:
    done = await pod.exec(["sh", "-c", "echo forged; echo real >&3"], channel_limit=100)
    assert (done.stdout, done.channel, done.dropped_channel) == (b"forged\n", b"real\n", 0)
    assert not (await pod.exec(["sh", "-c", "echo x >&3"])).ok  # no channel unless asked for
    done = await pod.exec(["sh", "-c", "head -c 1000 /dev/zero >&3"], channel_limit=100)
    assert len(done.channel) == 100 and done.dropped_channel == 900


async def test_orphans_leave_no_zombies(pod: AgentPod) -> None:  # 9.17
    done = await pod.exec(["sh", "-c", "for i in $(seq 200); do (true &); done"], timeout_s=20)
    assert done.ok
    for _ in range(100):
        left = await pod.processes()
        if not left.pids:
            break
        await asyncio.sleep(0.02)
    assert left.pids == [] and left.zombies == 0


async def test_repeated_request_id_runs_once_and_gives_the_first_result(pod: AgentPod) -> None:
    async def once() -> bytes:
        done = await pod.exec(["sh", "-c", "echo x >> log; sleep 0.2; wc -l < log"], request_id="same")
        return done.stdout

    assert await asyncio.gather(once(), once()) == [b"1\n", b"1\n"]
    assert await once() == b"1\n"
    assert await pod.read("log") == b"x\n"


async def test_many_programs_at_once_keep_their_results_apart(pod: AgentPod) -> None:
    done = await asyncio.gather(*(pod.exec(["sh", "-c", f"sleep 0.0{9 - n % 10}; echo {n}"]) for n in range(30)))
    assert [result.stdout for result in done] == [f"{n}\n".encode() for n in range(30)]


async def test_memory_bomb_is_flagged(backend: NamespaceBackend) -> None:
    if not backend.capabilities.memory_limit:
        pytest.skip("memory cannot be limited here")
    spec = PodSpec(
        memory_bytes=48 << 20,
        disk_bytes=8 << 20,
        files={"bomb.py": b"x = []\nwhile True: x.append(bytearray(1 << 20))"},
    )
    pod = await backend.create(spec)
    for argv in (["python", "bomb.py"], ["sh", "-c", "exec python bomb.py"], ["tail", "/dev/zero"]):
        try:
            done = await pod.exec(argv, timeout_s=20)
        except PodLost as lost:
            assert "out of memory" in str(lost)
            pod = await backend.create(spec)
        else:
            assert done.out_of_memory and done.signal == 9
            after = await pod.exec(["sh", "-c", "exit 3"])
            assert after.exit_code == 3 and not after.out_of_memory
    ran = await pod.call("run", {"command": "python bomb.py"}, {"timeout_ms": 20000})
    assert ran["oom"] and ran["error"] == "out_of_memory" and not ran["timed_out"]


async def test_fork_bomb_is_limited_and_ends_with_its_time(backend: NamespaceBackend) -> None:
    pod = await backend.create(
        PodSpec(processes=24, files={"bomb.py": b"import os\nwhile True:\n  try: os.fork()\n  except OSError: pass\n"})
    )
    task = asyncio.create_task(pod.exec(["python", "bomb.py"], timeout_s=1.5))
    await asyncio.sleep(0.8)
    used = (await backend.stats(pod)).processes
    assert used is None or used <= 24
    assert (await task).timed_out
    assert (await pod.processes()).pids == []
    assert (await pod.exec(["sh", "-c", "echo well"])).stdout == b"well\n"


async def test_full_disk_is_an_error_of_the_command_and_not_of_the_pod(backend: NamespaceBackend) -> None:  # 9.22
    pod = await backend.create(PodSpec(disk_bytes=4 << 20))
    done = await pod.exec(["sh", "-c", "head -c 9000000 /dev/zero > big"], timeout_s=10)
    assert done.exit_code == 1 and b"No space left" in done.stderr and not done.out_of_memory
    with pytest.raises(PodRefused) as caught:
        await pod.write("more", b"x" * 100_000)
    assert caught.value.error == "disk_full"
    assert (await pod.exec(["rm", "big"])).ok
    await pod.write("more", b"x" * 100_000)


async def test_cpu_time_of_one_process_is_limited(backend: NamespaceBackend) -> None:
    pod = await backend.create(PodSpec(cpu_s=7))
    assert (await pod.exec(["sh", "-c", "ulimit -t"])).stdout == b"7\n"
    # a process that has used it up is ended by the signal, not by the clock
    done = await pod.exec(["sh", "-c", "ulimit -t 1; while :; do :; done"], timeout_s=40)
    assert done.signal in (9, 24) and not done.timed_out
