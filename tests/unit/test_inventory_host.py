"""The machine around the GPUs from captured outputs, lspci's link status, and which file is read, noted or refused. Values worked by hand."""

import pytest
from conftest import least_seconds

from fieldbook.errors import BadInput
from fieldbook.inventory import host, lspci
from fieldbook.inventory.captured import LARGEST_BYTES, read_path, read_text

MIB, KIB = 2**20, 2**10

# ---- lspci ----------------------------------------------------------------------------------------------------------------------------------------------

GPU_HEAD = "{0} 3D controller: NVIDIA Corporation GX100 [Some GPU] (rev a1)\n"
LINK = "\t\tLnkCap:\tPort #0, Speed 16GT/s, Width x16, ASPM not supported\n\t\tLnkSta:\tSpeed {0}, Width {1}\n"


def ports(text):
    return lspci.read_lspci(text).ports


def test_a_downgraded_gpu():
    reading = lspci.read_lspci(GPU_HEAD.format("3b:00.0") + LINK.format("2.5GT/s (downgraded)", "x4 (downgraded)"))
    [port] = reading.ports
    assert (port.address, port.is_gpu, port.is_bridge, port.device) == ("0000:3b:00.0", True, False, "3D controller: NVIDIA Corporation GX100 [Some GPU]")
    assert (port.speed_gt_s, port.speed_cap_gt_s, port.width_lanes, port.width_cap_lanes, port.downgraded) == (2.5, 16.0, 4, 16, ["speed", "width"])
    assert [(g.bus_id, g.index, g.name) for g in reading.gpus] == [("0000:3b:00.0", None, "NVIDIA Corporation GX100 [Some GPU]")]


def test_several_devices_only_nvidia_display_controllers_are_gpus():
    text = GPU_HEAD.format("00000000:3B:00.0") + LINK.format("16GT/s (ok)", "x16 (ok)")
    text += "\n3b:00.1 Audio device: NVIDIA Corporation Audio\n" + LINK.format("16GT/s", "x8")
    text += "\n03:00.0 VGA compatible controller: Another Vendor\n" + LINK.format("5GT/s", "x1")
    found = ports(text)
    assert [(p.address, p.is_gpu, p.width_lanes) for p in found] == [("0000:3b:00.0", True, 16), ("0000:3b:00.1", False, 8), ("0000:03:00.0", False, 1)]
    assert found[0].downgraded == []


@pytest.mark.parametrize("quote", ["", "> ", "# "])
def test_bare_lines_are_devices_without_address(quote):
    text = "".join(f"{quote}{line.strip()}\n" for width in ("x8", "x16") for line in LINK.format("16GT/s", width).strip().split("\n"))
    assert [(p.address, p.is_gpu, p.width_lanes, p.width_cap_lanes) for p in ports(text)] == [(None, None, 8, 16), (None, None, 16, 16)]


def test_addresses_come_from_the_command_lines():
    text = "".join(f"$ sudo lspci -vvs {bus}:00.0 | grep Lnk\n{LINK.format('16GT/s', width)}" for bus, width in (("3b", "x8"), ("5e", "x16")))
    assert [(p.address, p.width_lanes) for p in ports(text)] == [("0000:3b:00.0", 8), ("0000:5e:00.0", 16)]


def test_the_second_capability_is_not_the_first():
    text = "3b:00.0 3D controller: NVIDIA\n\tLnkCap2: Supported Link Speeds: 2.5-8GT/s\n\tLnkSta2: Current De-emphasis Level: -6dB\n" + LINK.format(
        "8GT/s", "x16"
    )
    assert [(p.speed_gt_s, p.speed_cap_gt_s) for p in ports(text)] == [(8.0, 16.0)]


@pytest.mark.parametrize(("control", "expected"), [("ReqRedir- CmpltRedir-", False), ("ReqRedir+ CmpltRedir+", True), ("ReqRedir- CmpltRedir+", True)])
def test_a_bridge_and_its_access_control(control, expected):
    """ACSCap says what the bridge could do; only ACSCtl says what it does."""
    text = (
        "3a:00.0 PCI bridge: Some Switch (rev ab)\n\tBus: primary=3a, secondary=3B, subordinate=3c, sec-latency=0\n"
        + LINK.format("8GT/s", "x16")
        + f"\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+\n\t\tACSCtl:\tSrcValid- TransBlk- {control}\n"
    )
    [port] = ports(text)
    assert (port.is_bridge, port.is_gpu, port.secondary_bus, port.acs_redirect) == (True, False, "0000:3b", expected)
    assert ports(text.split("\t\tACSCtl")[0])[0].acs_redirect is None


def test_without_root_and_without_a_link():
    denied = "3b:00.0 3D controller: NVIDIA Corporation X\n\tCapabilities: <access denied>\n"
    assert lspci.read_lspci(denied) is None
    reading = lspci.read_lspci(denied + "5e:00.0 3D controller: NVIDIA Corporation X\n" + LINK.format("8GT/s", "x8"))
    assert [p.address for p in reading.ports] == ["0000:5e:00.0"] and "without root" in reading.notes[0]
    assert lspci.read_lspci("3b:00.0 3D controller: NVIDIA\n\tLnkSta: Speed unknown, Width x63\n") is None


# ---- numactl --------------------------------------------------------------------------------------------------------------------------------------------

TWO_NODES = (
    "available: 2 nodes (0-1)\nnode 0 cpus: 0 1 4 5\nnode 0 size: 1000 MB\nnode 0 free: 10 MB\nnode 1 cpus: 2 3 6 7\nnode 1 size: 2000 MB\nnode 1 free: 1 MB\n"
    "node distances:\nnode   0   1 \n  0:  10  21 \n  1:  21  10 \n"
)


def numa(text):
    return [(n.node, n.cpus, n.memory_total_bytes) for n in host.read_numactl(text).numa]


@pytest.mark.parametrize("change", [str, lambda t: t.replace("\n", "\n> ").join(["> ", ""]), lambda t: "".join(f"    {line}\n" for line in t.split("\n"))])
def test_two_numa_nodes(change):
    assert numa(change(TWO_NODES)) == [(0, [0, 1, 4, 5], 1000 * MIB), (1, [2, 3, 6, 7], 2000 * MIB)]
    assert host.read_numactl(change(TWO_NODES)).incomplete == []


def test_odd_numa_nodes():
    assert numa("available: 2 nodes (0,8)\nnode 0 cpus: 0 1\nnode 0 size: 10 MB\nnode 8 cpus:\nnode 8 size: 97000 MB\n") == [
        (0, [0, 1], 10 * MIB),
        (8, [], 97000 * MIB),
    ]
    assert numa("available: 1 nodes (0)\nnode 0 cpus: 0 1 2\n3 4 5\nnode 0 size: 10 MB\n") == [(0, [0, 1, 2, 3, 4, 5], 10 * MIB)]
    assert numa("node 0 size: 10 MB\n") == [(0, None, 10 * MIB)]
    none = host.read_numactl("No NUMA available on this system\n")
    assert none.numa == [] and "no NUMA" in none.notes[0]
    assert host.read_numactl("nothing\n") is None


def test_numactl_that_lacks_or_repeats_nodes_says_so():
    assert host.read_numactl(TWO_NODES[: TWO_NODES.index("node 1")]).incomplete == ["numactl -H states 2 NUMA nodes and lists 1"]
    assert host.read_numactl(TWO_NODES.replace("node 0 size", "node 0 cpus: 9\nnode 0 size")).incomplete == [
        "numactl -H lists node 0 more than once: the last one is read"
    ]
    assert host.read_numactl("available: 1 nodes (0)\nnode -1 cpus: 0\nnode 0 size: -10 MB\n").numa == []


def test_cpu_lists():
    assert host.parse_cpu_list("0-2,5\n") == [0, 1, 2, 5] and host.parse_cpu_list("") == [] and host.parse_cpu_list("x,3,-4,1-") == [3]
    assert host.cpu_ranges([0, 1, 2, 5]) == "0-2,5" and host.cpu_ranges([]) == ""
    assert len(host.parse_cpu_list(",".join(["0-99999", "0-8000"] * 1000))) <= 2 * 2**13  # a damaged list does not fill the memory


# ---- lscpu ----------------------------------------------------------------------------------------------------------------------------------------------

LSCPU = {
    "Architecture": "x86_64", "CPU(s)": "8", "Thread(s) per core": "2", "Core(s) per socket": "2", "Socket(s)": "2", "NUMA node(s)": "2",
    "NUMA node0 CPU(s)": "0-3", "NUMA node1 CPU(s)": "4,6-7", "Model name": "Some CPU @ 2.0GHz", "Flags": "fpu avx2 avx512f",
}  # fmt: skip


def entry(key, data, children=""):
    return f'{{"field": "{key}:", "data": {data}{children}}}'


FLAT = '{"lscpu": [' + ", ".join(entry(k, f'"{v}"') for k, v in LSCPU.items()) + "]}"
NESTED = '{"lscpu": [' + entry("Architecture", '"x86_64"') + ", " + entry(
    "CPU(s)", '"8"', ', "children": [' + ", ".join(entry(k, f'"{v}"') for k, v in list(LSCPU.items())[2:]) + "]"
) + ", " + entry("Vulnerabilities", "null") + "]}"  # fmt: skip
PLAIN = "".join(f"{key + ':':<24}{value}\n" for key, value in LSCPU.items())


@pytest.mark.parametrize("text", [PLAIN, FLAT, NESTED, "$ lscpu -J\n" + FLAT + "\n$ \n", "> " + PLAIN.replace("\n", "\n> ")])
def test_lscpu(text):
    reading = host.read_lscpu(text)
    h = reading.host
    assert (h.system, h.cpu_model, h.sockets, h.cores, h.logical_cpus, h.isa) == ("captured, x86_64", "Some CPU @ 2.0GHz", 2, 4, 8, ["avx2", "avx512f"])
    assert [(n.node, n.cpus) for n in reading.numa] == [(0, [0, 1, 2, 3]), (1, [4, 6, 7])] and not reading.incomplete


def test_lscpu_that_breaks_off():
    reading = host.read_lscpu(FLAT[: FLAT.index("Socket(s)")])
    assert (reading.host.logical_cpus, reading.host.sockets, reading.host.cores) == (8, None, None) and "breaks off" in reading.incomplete[0]
    deep = '{"lscpu": ' + '[{"field":"a","data":"b","children":' * 5000
    for text in (FLAT[:30], '{"lscpu": null}', '{"lscpu": [{"field": 5, "data": "8"}]}', '{"lscpu": [{"field": "CPU(s):", "data": 8}]}', deep):
        with pytest.raises(BadInput) as refused:
            host.read_lscpu(text)
        assert "lscpu" in str(refused.value) and "\n" not in str(refused.value)


def test_lscpu_of_a_virtual_machine():
    h = host.read_lscpu(PLAIN.replace("Socket(s):              2", "Socket(s):              -")).host
    assert h.sockets is None and h.cores is None and h.logical_cpus == 8 and h.unknown == {"sockets": "-"}


def test_a_cpu_list_that_cannot_be_read_is_not_an_empty_node():
    assert [(n.node, n.cpus) for n in host.read_lscpu(PLAIN.replace("0-3", "3-0")).numa] == [(0, None), (1, [4, 6, 7])]
    assert host.read_lscpu("Name: me\nCity: here\n") is None


# ---- memory, shared memory, kernel ----------------------------------------------------------------------------------------------------------------------


def told(text, source="x.txt"):
    [reading] = read_text(text, source)
    return {k: v for k, v in reading.host.model_dump().items() if v not in (None, [], {})}


def test_meminfo():
    assert told("MemTotal:       1024 kB\nMemFree:  1 kB\nMemAvailable:  512 kB\n") == {"memory_total_bytes": MIB, "memory_available_bytes": MIB // 2}
    assert told("MemTotal:       1024 kB\nMemFree:  1 kB\n") == {"memory_total_bytes": MIB}  # before Linux 3.14
    assert host.read_meminfo("MemFree:  1 kB\n") is None and host.read_meminfo("MemTotal: -5 kB\nMemFree: 1 kB\n") is None


FREE = "               total        used        free      shared  buff/cache   available\nMem:    {0}  1  2  3  4  {1}\nSwap:  0 0 0\n"


def test_free_counts_only_in_bytes():
    assert told(FREE.format(540_000_002_048, 500_000_000_000)) == {"memory_total_bytes": 540_000_002_048, "memory_available_bytes": 500_000_000_000}
    assert host.read_free(FREE.format(8_589_934_592, 5)).host.memory_total_bytes == 8 * 2**30
    # Plain `free` on the same machine, in KiB: 515 GiB, never 540 MB; and `free -m`, `free -g`.
    for rounded in (527_343_752, 515_000, 515, "9" * 30):
        assert host.read_free(FREE.format(rounded, 400)) is None


@pytest.mark.parametrize(("unit", "size"), [("1B-blocks", 1), ("1-blocks", 1), ("1K-blocks", KIB), ("1024-blocks", KIB)])
def test_shared_memory(unit, size):
    text = f"Filesystem {unit} Used Available Use% Mounted on\nshm 65536 1024 64512 2% /dev/shm\n"
    assert told(text) == {"shm_total_bytes": 65536 * size, "shm_free_bytes": 64512 * size}
    assert host.read_df_shm(text.replace("64512", "-5")) is None and host.read_df_shm(text.replace("/dev/shm", "/")) is None


def test_iommu_and_kernel_options():
    assert told("iommu groups: 7\n") == {"iommu_groups": 7} and host.read_iommu("iommu groups: 0\n").host.iommu_groups == 0
    assert host.read_iommu("iommu groups: -3\n") is None
    line = "BOOT_IMAGE=/vmlinuz root=UUID=1 ro intel_iommu=on iommu=pt quiet pci=noats\n"
    assert host.read_cmdline(line).host.kernel_options == ["intel_iommu=on", "iommu=pt", "pci=noats"]
    assert host.read_cmdline("quiet splash\n") is None and host.read_cmdline("quiet splash\n", "cmdline.txt").host.kernel_options == []
    assert host.read_cmdline(line + "a second line\n") is None


# ---- files and folders ----------------------------------------------------------------------------------------------------------------------------------


def put(folder, name, content):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name


def refusal(path):
    with pytest.raises(BadInput) as refused:
        read_path(path)
    assert "\n" not in str(refused.value) and path.name in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-8"])
def test_text_in_the_encodings_of_windows(tmp_path, encoding):
    readings, notes = read_path(put(tmp_path, "numactl.txt", TWO_NODES.replace("\n", "\r\n").encode(encoding)))
    assert [(r.command, r.source, len(r.numa)) for r in readings] == [("numactl -H", "numactl.txt", 2)] and notes == []


def test_files_that_are_refused(tmp_path):
    assert "not a text file" in refusal(put(tmp_path, "a.bin", b"\x7fELF\0\0\0"))
    assert "empty: no output in it" in refusal(put(tmp_path, "b.txt", ""))
    assert "begins with 'hello'" in refusal(put(tmp_path, "c.txt", "hello\n"))
    with open(tmp_path / "d.txt", "wb") as huge:
        huge.truncate(LARGEST_BYTES + MIB)  # no disk is used
    assert "33 MiB, larger than any output" in refusal(tmp_path / "d.txt")
    assert "no such file or folder" in refusal(tmp_path / "none.txt")
    refusal(put(tmp_path, "e.txt", bytes(range(1, 256)) * 40))


def test_a_folder(tmp_path):
    put(tmp_path, "numactl.txt", TWO_NODES)
    put(tmp_path, "meminfo.txt", "MemTotal: 1024 kB\nMemFree: 1 kB\n")
    put(tmp_path, "notes.txt", "hello\n")
    put(tmp_path, "lspci.txt", "")
    put(tmp_path, "README.md", "hello\n")
    put(tmp_path, ".hidden", "hello\n")
    (tmp_path / "folder").mkdir()
    readings, notes = read_path(tmp_path)
    assert {r.command: r.source for r in readings} == {"/proc/meminfo": "meminfo.txt", "numactl -H": "numactl.txt"}
    assert notes[0] == "lspci.txt: empty, the command printed nothing" and notes[1].startswith("not read: ") and "notes.txt" in notes[1] and len(notes) == 2


@pytest.mark.parametrize("name", ["lscpu.json", "topo-m.txt", "nvidia-smi-q.xml", "meminfo.txt"])
def test_a_known_file_that_cannot_be_read_is_named(tmp_path, name):
    put(tmp_path, "numactl.txt", TWO_NODES)
    put(tmp_path, name, '{"lscpu": [{"field')
    with pytest.raises(BadInput, match=name):
        read_path(tmp_path)


def test_a_folder_without_outputs(tmp_path):
    put(tmp_path, "notes.txt", "hello\n")
    assert "no captured output in this folder" in refusal(tmp_path)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = put(tmp_path, "numactl.txt", TWO_NODES)

    def denied(self, *_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", denied)
    assert "cannot be read (Permission denied)" in refusal(path)
    monkeypatch.setattr(type(path), "iterdir", denied)
    assert "cannot be read (Permission denied)" in refusal(tmp_path)


def test_several_outputs_in_one_text():
    assert [r.command for r in read_text("$ lscpu\n" + PLAIN + "\n$ numactl -H\n" + TWO_NODES)] == ["lscpu", "numactl -H"]


# ---- speed ----------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["", "3b:00.0 3D controller\nLnkCap: ", "node 0 cpus: 1", "CPU(s): 2\nSocket(s): ", "  total used free\n"])
def test_no_text_is_slow(before):
    """1 s for 100 kB, tried at a quarter of that, where a quadratic pattern takes a sixteenth of its time; the bad ones took minutes."""
    readers = (lspci.read_lspci, host.read_lscpu, host.read_numactl, host.read_meminfo, host.read_free, host.read_df_shm, host.read_iommu, host.read_cmdline)
    for piece in (
        "\n",
        " ",
        "\t",
        "> ",
        "| ",
        "1 ",
        "1,",
        "-",
        "A",
        "a: 1\n",
        "LnkCap:\n",
        "lspci -s ",
        "lspci ",
        "3b:00.0 ",
        "node 0 cpus: 1\n",
        '{"lscpu":[',
        '"',
    ):
        text = before + piece * (25_000 // len(piece)) + "!\n"
        for reader in readers:
            assert least_seconds(lambda read=reader, text=text: read(text), 0.5, BadInput) < 0.5, (reader.__name__, piece)
