"""Nodes from what ranks say of themselves."""

from __future__ import annotations

import socket

import pytest

from hf_osdp.distributed.topology import Topology, find_topology, node_name, topology_of
from hf_osdp.errors import HardwareError


def test_equal_nodes():
    assert topology_of(["a", "a", "b", "b", "c", "c"]) == Topology(nodes=3, ranks_per_node=2)
    assert topology_of(["a"] * 4) == Topology(nodes=1, ranks_per_node=4)
    assert topology_of(["a", "b"]).world_size == 2


def test_a_process_alone():
    assert find_topology() == Topology(nodes=1, ranks_per_node=1)


def test_unequal_nodes_name_each_and_the_remedy():
    with pytest.raises(HardwareError, match=r"different numbers of processes \(a: 3, b: 1\); start equally many on each, for example 1"):
        topology_of(["a", "a", "a", "b"])


def test_ranks_dealt_out_in_turn_are_refused():
    with pytest.raises(HardwareError, match=r"Ranks of a are not numbered one after the other; .*--distribution=block"):
        topology_of(["a", "b", "a", "b"])


def test_the_launcher_goes_before_the_host_name():
    assert node_name({"GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == "node 1"
    assert node_name({}) == socket.gethostname()
