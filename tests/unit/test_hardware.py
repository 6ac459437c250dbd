"""The hardware catalogue: complete, consistent, and equal to the documents at the figures that matter most."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

import pytest

from titan_planner.hardware import ALIASES, GPUS, LINKS, NODES, UnknownHardware, find_gpu, find_link, find_node
from titan_planner.hardware import gpus as gpus_module
from titan_planner.hardware import links as links_module
from titan_planner.hardware import nodes as nodes_module

GPU_NAMES = sorted(GPUS)
ACCELERATORS = sorted(name for name, gpu in GPUS.items() if gpu.vendor != "cpu")
LINK_NAMES = sorted(LINKS)
NODE_NAMES = sorted(NODES)
FINDERS = (
    (find_gpu, GPUS, gpus_module.GPU_ALIASES),
    (find_link, LINKS, links_module.LINK_ALIASES),
    (find_node, NODES, nodes_module.NODE_ALIASES),
)


# Structure.


def test_no_entry_hides_another():
    assert len(GPUS) == len(gpus_module._ENTRIES)
    assert len(LINKS) == len(links_module._ENTRIES)
    assert len(NODES) == len(nodes_module._TABLE)


def test_names_are_unique_across_the_three_tables_and_the_aliases():
    names = [*GPUS, *LINKS, *NODES, *gpus_module.GPU_ALIASES, *links_module.LINK_ALIASES, *nodes_module.NODE_ALIASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", [*GPUS, *LINKS, *NODES, *ALIASES])
def test_names_are_typeable(name):
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)


@pytest.mark.parametrize("table", [GPUS, LINKS, NODES], ids=["gpus", "links", "nodes"])
def test_every_entry_is_filed_under_its_name_and_says_where_it_is_from(table):
    for name, entry in table.items():
        assert entry.name == name
        assert len(entry.source.strip()) > 10, name
        assert all(line.strip() for line in entry.source.splitlines()), name


def test_every_alias_resolves_to_an_entry_and_shadows_none():
    for find, table, aliases in FINDERS:
        for alias, target in aliases.items():
            assert alias not in table
            assert find(alias) is table[target]


@pytest.mark.parametrize("name", GPU_NAMES)
def test_every_gpu_has_a_link_of_the_catalogue(name):
    assert GPUS[name].intra_node_link in LINKS


@pytest.mark.parametrize("name", NODE_NAMES)
def test_every_node_is_made_of_the_catalogue(name):
    node = NODES[name]
    assert node.gpus_per_node >= 1
    assert node.intra_node == GPUS[node.gpu].intra_node_link
    assert LINKS[node.intra_node].gb_per_s > 0
    inter = LINKS[node.inter_node]
    per_gpu = inter.gb_per_s if inter.per_gpu else inter.gb_per_s / node.gpus_per_node
    assert per_gpu < LINKS[node.intra_node].gb_per_s, "a node is where the fast links are"


def test_import_takes_nothing_but_the_standard_library():
    probe = "import sys, titan_planner.hardware; print([m for m in ('torch', 'yaml', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Plausibility.


@pytest.mark.parametrize("name", ACCELERATORS)
def test_rates_are_dense_and_of_the_right_size(name):
    gpu = GPUS[name]
    assert 100 <= gpu.bf16_tflops <= 2500, "a sparse figure would be twice that"
    assert 800 <= gpu.memory_gb_per_s <= 8000
    assert 70 <= gpu.compute_units <= 320
    assert (gpu.device, gpu.backend) == ("cuda", "nccl")
    # FLOP per byte at which a kernel stops being memory-bound: 37 (H20) to 419 (L40S).
    assert 30 <= gpu.bf16_tflops * 1000 / gpu.memory_gb_per_s <= 450


@pytest.mark.parametrize("name", GPU_NAMES)
def test_narrow_formats_double_the_rate_where_the_hardware_has_them(name):
    gpu = GPUS[name]
    assert gpu.float8 == (gpu.fp8_tflops is not None)
    assert gpu.nvfp4 == (gpu.fp4_tflops is not None)
    if gpu.fp8_tflops is not None:
        assert gpu.fp8_tflops / gpu.bf16_tflops == pytest.approx(2, rel=0.02)
    if gpu.fp4_tflops is not None:
        assert 1.98 <= gpu.fp4_tflops / gpu.fp8_tflops <= 3.02, "2 on Blackwell, 3 on Blackwell Ultra"


@pytest.mark.parametrize("name", GPU_NAMES)
def test_capabilities_follow_the_architecture(name):
    gpu = GPUS[name]
    assert (gpu.compute_capability is None) == (gpu.vendor != "nvidia")
    if gpu.compute_capability is not None:
        version = tuple(int(part) for part in gpu.compute_capability.split("."))
        assert gpu.float8 == (version >= (8, 9))
        assert gpu.mxfp8 == gpu.nvfp4 == (version >= (10, 0))


@pytest.mark.parametrize("name", ACCELERATORS)
def test_usable_memory_is_just_below_what_the_name_says(name):
    nominal = float(re.search(r"(\d+)gb", name)[1])
    assert 0.92 * nominal < GPUS[name].memory_gib < nominal


@pytest.mark.parametrize("name", LINK_NAMES)
def test_links_are_of_the_right_size(name):
    link = LINKS[name]
    assert 1 <= link.gb_per_s <= 900
    assert 1 <= link.latency_us <= 100


def test_links_of_a_gigabit_rate_carry_an_eighth_of_it():
    for name, link in LINKS.items():
        rate = re.fullmatch(r"(?:ib-\w+|roce|ethernet)-(\d+)", name)
        if rate:
            assert link.gb_per_s == int(rate[1]) / 8, name


# Figures.


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "memory_gb_per_s", "memory_gib"),
    [
        ("a100-sxm-80gb", 312.0, None, 2039.0, 79.15),
        ("h100-sxm-80gb", 989.4, 1978.9, 3350.0, 79.1),
        ("h100-sxm-96gb-hbm2e", 989.4, 1978.9, 2400.0, 95.0),
        ("h200-sxm-141gb", 989.4, 1978.9, 4800.0, 139.8),
        ("b200-180gb", 2250.0, 4500.0, 7700.0, 178.35),
        ("gb200-186gb", 2500.0, 5000.0, 8000.0, 184.31),
        ("mi300x-192gb", 1307.4, 2614.9, 5300.0, 191.98),
    ],
)
def test_spot_figures(name, bf16, fp8, memory_gb_per_s, memory_gib):
    gpu = GPUS[name]
    assert (gpu.bf16_tflops, gpu.fp8_tflops) == (bf16, fp8)
    assert (gpu.memory_gb_per_s, gpu.memory_gib) == (memory_gb_per_s, memory_gib)


def test_peaks_agree_with_torchtitans_table():
    torchtitan = {
        "a100": 312, "h100": 989, "h100-nvl": 835, "h100-pcie": 756, "h200": 989, "h20": 148, "b200": 2250,
        "b300": 2250, "gb200": 2500, "gb300": 2500, "mi300x": 1300, "mi325x": 1300, "l40s": 362,
    }  # fmt: skip
    for name, tflops in torchtitan.items():
        assert find_gpu(name).bf16_tflops == pytest.approx(tflops, rel=0.006), name


def test_the_published_torchtitan_peaks_fit_the_card_they_were_measured_on():
    # pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md: 84.9 GiB, which no 80 GB card holds.
    assert find_gpu("h100-80gb").memory_gib < 84.9 < find_gpu("h100-96gb").memory_gib


def test_nvlink_generations_are_one_direction():
    assert [LINKS[name].gb_per_s for name in ("nvlink3", "nvlink4", "nvlink5")] == [300, 450, 900]


def test_latencies_give_the_all_gather_times_of_nccls_model():
    # base + steps x hop. AutoParallel, H100: 30 us measured in a node of 8; the others are NCCL's model in its port.
    base, hop, net_hop = 8.4, LINKS["nvlink4"].latency_us, LINKS["ib-ndr-400"].latency_us
    assert base + 7 * hop == pytest.approx(30, rel=0.1)
    for nodes, microseconds in ((2, 70), (4, 146), (8, 297), (16, 599), (32, 1204)):
        assert base + nodes * 7 * hop + (nodes - 1) * net_hop == pytest.approx(microseconds, rel=0.01)


def test_shared_links_are_marked():
    assert not LINKS["efa-p4d"].per_gpu and LINKS["efa-p4d"].gb_per_s == 50
    assert LINKS["efa-p5"].per_gpu and LINKS["efa-p5"].gb_per_s == 50


def test_the_cpu_is_nominal_and_says_so():
    cpu = GPUS["cpu"]
    assert (cpu.device, cpu.backend, cpu.intra_node_link) == ("cpu", "gloo", "loopback")
    assert "NOMINAL" in cpu.source and "NOMINAL" in LINKS["loopback"].source


# Look-up.


@pytest.mark.parametrize("written", ["h100", "H100", " h100_sxm ", "H100 SXM 80GB", "NVIDIA H100 80GB HBM3"])
def test_names_are_found_however_they_are_written(written):
    assert find_gpu(written) is GPUS["h100-sxm-80gb"]


@pytest.mark.parametrize(
    ("find", "wrong", "right"),
    [
        (find_gpu, "h100-smx-80gb", "h100-sxm-80gb"),
        (find_gpu, "mi300", "mi300x-192gb"),
        (find_link, "ib-ndr-4000", "ib-ndr-400"),
        (find_node, "DGX H-100", "dgx-h100"),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest_ones(find, wrong, right):
    with pytest.raises(UnknownHardware) as caught:
        find(wrong)
    assert caught.value.name == wrong
    assert caught.value.suggestions[0] == right
    assert len(caught.value.suggestions) <= 3
    assert f"`{wrong}`" in str(caught.value) and f"`{right}`" in str(caught.value)


def test_suggestions_are_catalogue_names_each_once():
    with pytest.raises(UnknownHardware) as caught:
        find_gpu("h100-80")
    assert len(set(caught.value.suggestions)) == len(caught.value.suggestions)
    assert set(caught.value.suggestions) <= set(GPUS)


def test_nothing_close_means_no_suggestion():
    with pytest.raises(UnknownHardware, match=r"no GPU is called `zzz`$"):
        find_gpu("zzz")


def test_a_name_of_one_table_is_unknown_to_the_others():
    with pytest.raises(UnknownHardware):
        find_gpu("nvlink4")


def test_unknown_hardware_is_a_key_error_and_travels_between_processes():
    error = UnknownHardware("h1000", ("h100-sxm-80gb",), "GPU")
    assert isinstance(error, KeyError)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.name, copy.suggestions, str(copy)) == (error.name, error.suggestions, str(error))
