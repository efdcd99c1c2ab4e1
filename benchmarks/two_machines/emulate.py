"""Several machines on one Linux box: `torchrun` in every one of N network namespaces, joined by rate-limited links.

    python benchmarks/two_machines/emulate.py [--nodes 2] [--ranks 2] [--rate 100mbit] -- script.py arguments
    python benchmarks/two_machines/emulate.py --nodes 3 --rate 50mbit/100mbit/200mbit -- script.py arguments

What follows `--` goes to torchrun on every node. A node is a network and a UTS namespace: host `node0`, address 10.77.0.1 on
`veth0`, a loopback of its own. Ranks of a node talk over its loopback, at the speed of memory; what leaves the node goes
through `veth0`, whose byte counters (/proc/net/dev) therefore count the link between machines. Two nodes of one rate are joined
by one pair, others by a bridge: what one sends to another passes its own rate, then the other's.

Nothing is left behind, however it ends. All of it runs in private pid, mount, network and UTS namespaces, which the kernel
takes down with their first process; and each process dies with the one that started it: the caller's death (SIGKILL too) ends
this program, whose death ends `unshare`, whose death ends the namespaces. No root is needed where users may make namespaces.

Exit code: 0, or that of the first node that failed; 77 where this machine does not permit it (stderr says what is missing);
124 after `--timeout`; 128 + n after signal n.
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
"""What is run, and the package that has it."""
MTU = 1500
GSO_BYTES = 16384
"""Largest packet that TCP hands to the link whole. Where it passes the burst, tbf cuts it into frames of the MTU, each with headers."""
SHAPING = ("burst", "32kb", "limit", "4mb")
PRIVATE = ("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
AS_ROOT_OF_ITS_OWN = ("unshare", "--user", "--map-root-user")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class NotPermitted(Exception):
    """This machine cannot emulate others; the message says what is missing."""


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
    """Options, and what torchrun is given as `command`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, default=2, help="machines (default 2, at most 200)")
    parser.add_argument("--ranks", type=count, default=2, help="processes on each (default 2)")
    parser.add_argument("--rate", type=link_rate, default=UNLIMITED, help="of links: 100mbit, 1gbit, of each a/b/c (default unlimited)")
    parser.add_argument("--timeout", type=float, help="seconds after which it is ended")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+", help="after --: what torchrun runs, with its arguments")
    options = parser.parse_args(arguments)
    try:
        options.rates = rates_of(options.rate, options.nodes)
    except ValueError as error:
        parser.error(str(error))
    return options


def rates_of(text: str, nodes: int) -> tuple[str, ...]:
    """Each machine's rate, of one for all or `a/b/c`; ValueError where these are not as many."""
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
            raise argparse.ArgumentTypeError(f"{rate!r} is not a rate; write it as 100mbit, 1gbit, {UNLIMITED}, or 50mbit/1gbit")
    return text


def ways_in(rate: str) -> tuple[str, ...]:
    """What must stand before `unshare` here: nothing for root, a user namespace for others.

    Raises:
        NotPermitted: tools, permissions or kernel modules are missing.
    """
    if absent := [f"{tool} ({package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]:
        raise NotPermitted(f"{', '.join(absent)} not found; install it.")
    if not Path("/dev/shm").is_dir():
        raise NotPermitted("/dev/shm does not exist; it is where the machines' files would lie.")
    ways = [(), AS_ROOT_OF_ITS_OWN] if os.geteuid() == 0 else [AS_ROOT_OF_ITS_OWN]
    tries = [subprocess.run([*way, "unshare", *PRIVATE, "true"], capture_output=True, text=True) for way in ways]
    permitted = [way for way, tried in zip(ways, tries, strict=True) if tried.returncode == 0]
    if not permitted:
        raise NotPermitted(
            f"namespaces are not permitted here ({last_line(tries[-1].stderr)}). Run as root, or let users make them: sysctl"
            " user.max_user_namespaces above 0, kernel.apparmor_restrict_unprivileged_userns=0; in a container, --cap-add SYS_ADMIN"
            " --cap-add NET_ADMIN."
        )
    pair = "ip link add t0 type veth peer name t1"
    shaped = f"{pair} && tc qdisc add dev t0 root tbf rate 1mbit burst 32kb limit 64kb"
    for step in [pair] if {*rate.split("/")} == {UNLIMITED} else [pair, shaped]:
        tried = subprocess.run([*permitted[0], "unshare", *PRIVATE, "sh", "-c", step], capture_output=True, text=True)
        if tried.returncode:
            raise NotPermitted(f"this kernel refuses `{step}` ({last_line(tried.stderr)}); it needs the modules veth and sch_tbf.")
    return permitted[0]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def run_outside(private: list[str], arguments: list[str], timeout_s: float | None) -> int:
    """Start this program again in the namespaces; return only when all that ran there is gone."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # where the caller dies, so does this
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # the namespaces' first process becomes a child when unshare is killed, and can be waited for
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    child = subprocess.Popen(
        [*private, sys.executable, __file__, "--inside", *arguments],
        stdin=subprocess.DEVNULL, start_new_session=True,  # an interrupt from the terminal reaches this process alone
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
    """A pid namespace's first process is gone only when all in it are."""
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass


def run_nodes(options: argparse.Namespace) -> int:
    """In the private namespaces: make the nodes, run torchrun on each. Ending ends them all, for this is the first process."""
    give_names(options.nodes)
    nodes = [Node(index) for index in range(options.nodes)]
    join(nodes, options.rates)
    for node, rate in zip(nodes, options.rates, strict=True):
        node.bring_up(rate)
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // len(nodes)
    shares = [cores[node.index * each :][:each] or cores for node in nodes]  # as many for each machine; all, where there are too few
    running = [node.torchrun(len(nodes), options.ranks, share, options.command) for node, share in zip(nodes, shares, strict=True)]
    while True:
        codes = [process.poll() for process in running]
        if failed := [code for code in codes if code]:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(0.05)


def give_names(nodes: int) -> None:
    """Names of the nodes, and no DNS: look-ups of others fail at once. Files lie in a /dev/shm of its own, and go with it."""
    shell("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    os.environ["TMPDIR"] = "/dev/shm"
    lines = ["127.0.0.1 localhost"]
    for index in range(nodes):
        lines += [f"{address(index)} node{index}", f"::ffff:{address(index)} node{index}"]  # torch's store asks for IPv6, too
    hosts = Path("/dev/shm/hosts")
    hosts.write_text("\n".join(lines) + "\n", encoding="ascii")
    shell("mount", "--bind", str(hosts), "/etc/hosts")
    if Path("/etc/resolv.conf").exists():
        shell("mount", "--bind", "/dev/null", "/etc/resolv.conf")


def join(nodes: list[Node], rates: Sequence[str]) -> None:
    """One pair between two nodes of one rate; a bridge, in this namespace, between others."""
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
        if rate != UNLIMITED:  # what comes to a node from several others
            shell("tc", "qdisc", "add", "dev", port, "root", "tbf", "rate", rate, *SHAPING)


class Node:
    """One machine: a process that holds its namespaces open."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._holder = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        self._holder.stdout.readline()  # its namespaces are there
        self.pid = self._holder.pid

    def bring_up(self, rate: str) -> None:
        """Host name, addresses, TCP as between real machines, rate."""
        self._run("hostname", f"node{self.index}")
        self._run("ip", "link", "set", "lo", "up")
        settings = {f"ipv6/conf/{INTERFACE}/disable_ipv6": 1, "ipv4/tcp_slow_start_after_idle": 0, "ipv4/tcp_no_metrics_save": 1}
        self._run("sh", "-c", "; ".join(f"echo {value} > /proc/sys/net/{name}" for name, value in settings.items()))
        self._run("ip", "link", "set", INTERFACE, "gso_max_size", str(GSO_BYTES))
        self._run("ip", "address", "add", f"{address(self.index)}/24", "dev", INTERFACE)
        self._run("ip", "link", "set", INTERFACE, "up")
        self._run("ip", "route", "replace", "10.77.0.0/24", "dev", INTERFACE, "src", address(self.index), *congestion_control())
        if rate != UNLIMITED:
            self._run("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, *SHAPING)

    def torchrun(self, nodes: int, ranks: int, cores: list[int], command: list[str]) -> subprocess.Popen:
        """Start torchrun here, on these cores."""
        keep = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}  # large buffers stay mapped between steps
        return subprocess.Popen(
            [
                *self._inside(), "taskset", "--cpu-list", ",".join(map(str, cores)),
                sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}",
                f"--node-rank={self.index}", f"--master-addr={address(0)}", "--master-port=29500", f"--local-addr={address(self.index)}",
                *command,
            ],
            env={"OMP_NUM_THREADS": "1", **keep, **os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip

    def _run(self, *command: str) -> None:
        shell(*self._inside(), *command)

    def _inside(self) -> tuple[str, ...]:
        return ("nsenter", f"--target={self.pid}", "--net", "--uts")


def congestion_control() -> tuple[str, ...]:
    """For a route. bbr, where it is the default, takes 63-90 % of the rate with so small a queue, cubic 92-98 %."""
    if "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii"):
        return ("congctl", "cubic")
    print("emulate: this kernel has no cubic; its own congestion control may not fill the link.", file=sys.stderr)
    return ()


def address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def shell(*command: str) -> None:
    """Run a command that must work: `ways_in` tried what may be refused."""
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
