"""Emulate several machines on one Linux machine: `torchrun` in each of N network namespaces, connected by rate-limited
links.

    python benchmarks/two_machines/emulate.py [--nodes 2] [--ranks 2] [--rate 100mbit] -- script.py arguments
    python benchmarks/two_machines/emulate.py --nodes 3 --rate 50mbit/100mbit/200mbit -- script.py arguments

The arguments after `--` are those of torchrun on every node. A node is a network namespace and a UTS namespace: host
`node0`, address 10.77.0.1 on `veth0`, its own loopback. Ranks of a node communicate over the loopback, at the speed of
memory. Data for other nodes goes through `veth0`, so its byte counters (/proc/net/dev) count the link between
machines. Two nodes with the same rate are connected by one veth pair; otherwise by a bridge, and data between two
nodes passes the sender's rate limit and then the receiver's.

Nothing remains after the run, however it ends. Everything runs in private pid, mount, network and UTS namespaces,
which the kernel removes with their first process. Each process dies with its parent: when the caller dies (also by
SIGKILL), this program ends, then `unshare`, then the namespaces. Root is not needed if users may create namespaces.

Exit code: 0, or that of the first node that failed; 77 if this machine does not permit the emulation (stderr says what
is missing); 124 after `--timeout`; 128 + n after signal n.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NOT_PERMITTED, TIMED_OUT = 77, 124
INTERFACE = "veth0"
UNLIMITED = "unlimited"
TOOLS = {
    **dict.fromkeys(("unshare", "nsenter", "setpriv", "taskset"), "util-linux"),
    "mount": "mount", "hostname": "hostname", "ip": "iproute2", "tc": "iproute2",
}  # fmt: skip
"""Required tools, and the packages that contain them."""
MTU = 1500
GSO_BYTES = 16384
"""Largest packet that TCP passes to the link whole.

Above the burst, tbf splits it into frames of the MTU, each with headers.
"""
SHAPING = ("burst", "32kb", "limit", "4mb")
PRIVATE = ("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
AS_ROOT_OF_ITS_OWN = ("unshare", "--user", "--map-root-user")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class NotPermitted(Exception):
    """Raised if this machine cannot emulate others; the message says what is missing."""


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.inside:
        return run_nodes(options)
    try:
        become = ways_in(options.rate)
    except NotPermitted as error:
        print(f"emulate: {error}", file=sys.stderr)
        return NOT_PERMITTED
    return run_outside([*become, "setpriv", "--pdeathsig", "KILL", "unshare", *PRIVATE], arguments, options.timeout)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; `command` has the arguments of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, default=2, help="machines (default 2, at most 200)")
    parser.add_argument("--ranks", type=count, default=2, help="processes per machine (default 2)")
    parser.add_argument(
        "--rate",
        type=link_rate,
        default=UNLIMITED,
        help="link rate: 100mbit, 1gbit, a/b/c for each (default unlimited)",
    )
    parser.add_argument("--timeout", type=float, help="seconds after which the run is ended")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+", help="after --: program for torchrun, with its arguments")
    options = parser.parse_args(arguments)
    try:
        options.rates = rates_of(options.rate, options.nodes)
    except ValueError as error:
        parser.error(str(error))
    return options


def rates_of(text: str, nodes: int) -> tuple[str, ...]:
    """Return each machine's rate, from one for all or `a/b/c`; raise ValueError if their number differs from
    `nodes`.
    """
    rates = tuple(text.split("/"))
    if len(rates) not in (1, nodes):
        raise ValueError(f"{text} has {len(rates)} rates for {nodes} machines; give one, or one for each (--nodes)")
    return rates * (nodes // len(rates))


def count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 200:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to 200")
    return int(text)


def link_rate(text: str) -> str:
    for rate in text.split("/"):
        if rate != UNLIMITED and not (re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate) and float(rate[:-4]) > 0):
            raise argparse.ArgumentTypeError(
                f"{rate!r} is not a rate; write it as 100mbit, 1gbit, {UNLIMITED}, or 50mbit/1gbit"
            )
    return text


def ways_in(rate: str) -> tuple[str, ...]:
    """Return the command prefix for `unshare`: none for root, a user namespace for others.

    Raises:
        NotPermitted: tools, permissions or kernel modules are missing.
    """
    if absent := [f"{tool} ({package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]:
        raise NotPermitted(f"{', '.join(absent)} not found; install it.")
    if not Path("/dev/shm").is_dir():
        raise NotPermitted("/dev/shm does not exist; the machines' files are stored there.")
    ways = [(), AS_ROOT_OF_ITS_OWN] if os.geteuid() == 0 else [AS_ROOT_OF_ITS_OWN]
    tries = [subprocess.run([*way, "unshare", *PRIVATE, "true"], capture_output=True, text=True) for way in ways]
    permitted = [way for way, tried in zip(ways, tries, strict=True) if tried.returncode == 0]
    if not permitted:
        raise NotPermitted(
            f"namespaces are not permitted here ({last_line(tries[-1].stderr)}). Run as root, or let users make them:"
            " sysctl"
            " user.max_user_namespaces above 0, kernel.apparmor_restrict_unprivileged_userns=0; in a container,"
            " --cap-add SYS_ADMIN"
            " --cap-add NET_ADMIN."
        )
    pair = "ip link add t0 type veth peer name t1"
    shaped = f"{pair} && tc qdisc add dev t0 root tbf rate 1mbit burst 32kb limit 64kb"
    for step in [pair] if {*rate.split("/")} == {UNLIMITED} else [pair, shaped]:
        tried = subprocess.run([*permitted[0], "unshare", *PRIVATE, "sh", "-c", step], capture_output=True, text=True)
        if tried.returncode:
            raise NotPermitted(
                f"this kernel refuses `{step}` ({last_line(tried.stderr)}); it needs the modules veth and sch_tbf."
            )
    return permitted[0]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def run_outside(private: list[str], arguments: list[str], timeout_s: float | None) -> int:
    """Start this program again in the namespaces; return only when all their processes have ended."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # this process dies with its parent
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # if unshare is killed, the namespaces' first process becomes a child to wait for
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    child = subprocess.Popen(
        [*private, sys.executable, __file__, "--inside", *arguments],
        stdin=subprocess.DEVNULL, start_new_session=True,  # an interrupt from the terminal reaches only this process
    )  # fmt: skip
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"emulate: not done after {timeout_s:g} s; ended.", file=sys.stderr)
        return TIMED_OUT
    finally:
        child.kill()
        child.wait()
        wait_for_orphans()


def wait_for_orphans() -> None:
    """Wait for the first process of the pid namespace, which ends after all others in it."""
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass


def run_nodes(options: argparse.Namespace) -> int:
    """Create the nodes in the private namespaces and run torchrun on each.

    This is the first process, so its end ends all.
    """
    write_host_names(options.nodes)
    nodes = [Node(index) for index in range(options.nodes)]
    join(nodes, options.rates)
    for node, rate in zip(nodes, options.rates, strict=True):
        node.bring_up(rate)
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // len(nodes)
    shares = [
        cores[node.index * each :][:each] or cores for node in nodes
    ]  # equal numbers; all cores if there are too few
    running = [
        node.torchrun(len(nodes), options.ranks, share, options.command)
        for node, share in zip(nodes, shares, strict=True)
    ]
    while True:
        codes = [process.poll() for process in running]
        if failed := [code for code in codes if code]:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(0.05)


def write_host_names(nodes: int) -> None:
    """Write host names of the nodes and disable DNS, so that other look-ups fail at once.

    The files are in a private /dev/shm.
    """
    shell("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    os.environ["TMPDIR"] = "/dev/shm"
    lines = ["127.0.0.1 localhost"]
    for index in range(nodes):
        lines += [
            f"{address(index)} node{index}",
            f"::ffff:{address(index)} node{index}",
        ]  # torch's store also looks up IPv6
    hosts = Path("/dev/shm/hosts")
    hosts.write_text("\n".join(lines) + "\n", encoding="ascii")
    shell("mount", "--bind", str(hosts), "/etc/hosts")
    if Path("/etc/resolv.conf").exists():
        shell("mount", "--bind", "/dev/null", "/etc/resolv.conf")


def join(nodes: list[Node], rates: Sequence[str]) -> None:
    """Connect two nodes with the same rate by a veth pair, and others by a bridge in this namespace."""
    far_ends = [("name", INTERFACE, "mtu", str(MTU), "netns", str(node.pid)) for node in nodes]
    if len(nodes) == 2 and len({*rates}) == 1:
        shell("ip", "link", "add", *far_ends[0], "type", "veth", "peer", *far_ends[1])
        return
    shell("ip", "link", "add", "bridge0", "type", "bridge")
    shell("ip", "link", "set", "bridge0", "up")
    for index, (far_end, rate) in enumerate(zip(far_ends, rates, strict=True)):
        port = f"port{index}"
        shell("ip", "link", "add", "name", port, "mtu", str(MTU), "type", "veth", "peer", *far_end)
        shell("ip", "link", "set", port, "gso_max_size", str(GSO_BYTES), "master", "bridge0", "up")
        if rate != UNLIMITED:  # limits what a node receives from several others
            shell("tc", "qdisc", "add", "dev", port, "root", "tbf", "rate", rate, *SHAPING)


class Node:
    """An emulated machine; a process holds its namespaces open."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()  # its namespaces exist now
        self.pid = self._holder.pid

    def bring_up(self, rate: str) -> None:
        """Set host name, addresses, TCP settings as between real machines, and rate."""
        self._run("hostname", f"node{self.index}")
        self._run("ip", "link", "set", "lo", "up")
        settings = {
            f"ipv6/conf/{INTERFACE}/disable_ipv6": 1,
            "ipv4/tcp_slow_start_after_idle": 0,
            "ipv4/tcp_no_metrics_save": 1,
        }
        self._run("sh", "-c", "; ".join(f"echo {value} > /proc/sys/net/{name}" for name, value in settings.items()))
        self._run("ip", "link", "set", INTERFACE, "gso_max_size", str(GSO_BYTES))
        self._run("ip", "address", "add", f"{address(self.index)}/24", "dev", INTERFACE)
        self._run("ip", "link", "set", INTERFACE, "up")
        self._run(
            "ip",
            "route",
            "replace",
            "10.77.0.0/24",
            "dev",
            INTERFACE,
            "src",
            address(self.index),
            *congestion_control(),
        )
        if rate != UNLIMITED:
            self._run("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, *SHAPING)

    def torchrun(self, nodes: int, ranks: int, cores: list[int], command: list[str]) -> subprocess.Popen:
        """Start torchrun on this node, on these cores."""
        keep = {
            "MALLOC_MMAP_THRESHOLD_": str(2**30),
            "MALLOC_TRIM_THRESHOLD_": str(2**32),
        }  # large buffers stay mapped between steps
        return subprocess.Popen(
            [
                *self._inside(), "taskset", "--cpu-list", ",".join(map(str, cores)),
                sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}",
                f"--node-rank={self.index}", f"--master-addr={address(0)}", "--master-port=29500",
                f"--local-addr={address(self.index)}",
                *command,
            ],
            env={"OMP_NUM_THREADS": "1", **keep, **os.environ, "GLOO_SOCKET_IFNAME": INTERFACE,
                 "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip

    def _run(self, *command: str) -> None:
        shell(*self._inside(), *command)

    def _inside(self) -> tuple[str, ...]:
        return ("nsenter", f"--target={self.pid}", "--net", "--uts")


def congestion_control() -> tuple[str, ...]:
    """Return the options of a route. With so small a queue, bbr reaches 63-90 % of the rate, and cubic 92-98 %."""
    if "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii"):
        return ("congctl", "cubic")
    print("emulate: this kernel has no cubic; its own congestion control may not fill the link.", file=sys.stderr)
    return ()


def address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def shell(*command: str) -> None:
    """Run a command that must succeed, because `ways_in` has tested the permissions."""
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
