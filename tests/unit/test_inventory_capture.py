"""Captured outputs made safe to share. The programs of a GPU machine are stand-ins on PATH here: small scripts that print outputs made up in this file."""

import json
import os
import re
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, runs, until

from fieldbook import files
from fieldbook.errors import BadInput
from fieldbook.inventory import capture as module
from fieldbook.inventory import captured
from fieldbook.inventory.capture import COMMANDS, Secrets, anonymize, capture, cmdline_options, cut_lspci

REAL = ROOT.parent / "shared" / "captures"
UUIDS = ["GPU-3f2a9c1b-77aa-4d0e-9b1c-0123456789ab", "GPU-e81d22f0-1111-2222-3333-abcdefabcdef", "MIG-9a8b7c6d-0f1e-5d2c-8b3a-445566778899"]
NOBODY = Secrets()
SOMEBODY = Secrets(frozenset({"gpubox07", "gpubox07.lab.acme.example"}), frozenset({"lab.acme.example", "acme.example"}), frozenset({"alicew"}))
# None of these may survive in any file of the capture below.
SECRET = """1320922012345 1650123000999 0x8f3c2b1a99887766 CH4SS1S77 0x1f2e3d4c5b6a7988 7c1c0a52 d1cef00d gpubox07 acme alicew bobby train.py
    secret-model hf_token 48-b0-2d 48:b0:2d 10.20.30.40 192.168.7.9 2001:db8:: fe80::4ab0 506b:4b03 MT2251X00001 0x98039b0300a1b2c3 cmdline-secret
    tenant-vm enx48b02d112233 AB12CD34 vmlinuz storage07"""

QUERY = """\
index, name, uuid, pci.bus_id, memory.total [MiB], driver_version, serial
0, NVIDIA A100-SXM4-80GB, GPU-3f2a9c1b-77aa-4d0e-9b1c-0123456789ab, 00000000:07:00.0, 81920 MiB, 580.159.04, 1320922012345
1, NVIDIA A100-SXM4-80GB, GPU-e81d22f0-1111-2222-3333-abcdefabcdef, 00000000:0F:00.0, 81920 MiB, 580.159.04, 1650123000999
"""
LIST = f"""\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: {UUIDS[0]})
  MIG 3g.40gb     Device  0: (UUID: {UUIDS[2]})
GPU 1: NVIDIA A100-SXM4-80GB (UUID: {UUIDS[1]})
"""
GPU_XML = """\
	<gpu id="00000000:{bus}:00.0">
		<product_name>NVIDIA A100-SXM4-80GB</product_name>
		<serial>{serial}</serial>
		<uuid>{uuid}</uuid>
		<pdi>0x8f3c2b1a99887766</pdi>
		<vbios_version>92.00.45.10.03</vbios_version>
		<board_part_number>692-2G506-0200-002</board_part_number>
		<gpu_part_number>20B2-895-A1</gpu_part_number>
		<platformInfo>
			<chassis_serial_number>CH4SS1S77</chassis_serial_number>
			<host_id>7c1c0a52</host_id>
			<module_id>4</module_id>
			<gpu_fabric_guid>0x1f2e3d4c5b6a7988</gpu_fabric_guid>
		</platformInfo>
		<inforom_version><img_version>10.20.30.41</img_version></inforom_version>
		<pci>
			<pci_bus_id>00000000:{bus}:00.0</pci_bus_id>
			<max_link_gen>4</max_link_gen>
		</pci>
		<fb_memory_usage><total>81920 MiB</total></fb_memory_usage>
		<fabric><clusterUuid>d1cef00d-1234-4321-aaaa-bbbbccccdddd</clusterUuid></fabric>
		<vm_name>tenant-vm</vm_name>
		<processes>
			<process_info>
				<pid>4242</pid>
				<type>C</type>
				<process_name>/home/bobby/envs/gpubox07/bin/python3.10 /home/alicew/train.py --model secret-model --hf_token=AB12CD34</process_name>
				<used_memory>1024 MiB</used_memory>
			</process_info>
			<process_info>
				<pid>4243</pid>
				<process_name>[Not Found]</process_name>
			</process_info>
			<process_info>
				<pid>4244</pid>
				<process_name>VLLM::Worker_PP0</process_name>
			</process_info>
		</processes>
	</gpu>
"""
XML = (
    '<?xml version="1.0" ?>\n<nvidia_smi_log>\n\t<timestamp>Sun Nov 29 11:44:20 2026</timestamp>\n\t<driver_version>580.159.04</driver_version>\n'
    "\t<attached_gpus>2</attached_gpus>\n"
    + GPU_XML.format(bus="07", serial="1320922012345", uuid=UUIDS[0])
    + GPU_XML.format(bus="0F", serial="1650123000999", uuid=UUIDS[1].upper().replace("GPU-", "GPU-"))
    + "</nvidia_smi_log>\n"
)
TABLE = """\
Sun Nov 29 11:44:19 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.159.04             Driver Version: 580.159.04     CUDA Version: 13.0     |
|=========================================+========================+======================|
|   0  NVIDIA A100-SXM4-80GB          On  |   00000000:07:00.0 Off |                    0 |
| N/A   36C    P0             78W /  400W |    1024MiB /  81920MiB |      0%      Default |
+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|=========================================================================================|
|    0   N/A  N/A            4242      C   /home/alicew/gpubox07/bin/python3      1024MiB |
|    0   N/A  N/A            4243      G   /usr/lib/xorg/Xorg -auth /run/alicew      4MiB |
|    0   N/A  N/A            4245    C+G   ...--user-data-dir=/home/bobby/x          9MiB |
|    1     1    0            4246    M+C   [Not Found]                                N/A |
|    1   N/A  N/A            4247      C   ...miniconda3/envs/bobby/bin/python     512MiB |
+-----------------------------------------------------------------------------------------+
"""
LSPCI = """\
0000:00:01.0 PCI bridge: Intel Corporation Root Port (rev 04) (prog-if 00 [Normal decode])
	Bus: primary=00, secondary=05, subordinate=08, sec-latency=0
	LnkSta:	Speed 16GT/s, Width x16

0000:00:02.0 PCI bridge: Intel Corporation Other Root Port
	Bus: primary=00, secondary=20, subordinate=21, sec-latency=0

0000:05:00.0 PCI bridge: Broadcom PEX switch
	Bus: primary=05, secondary=06, subordinate=08, sec-latency=0
	Capabilities: [68] Express (v2) Upstream Port, IntMsgNum 0
	Capabilities: [148 v1] Device Serial Number 48-b0-2d-ff-ff-11-22-33

0000:07:00.0 3D controller: NVIDIA Corporation GA100 [A100 SXM4 80GB] (rev a1)
	Subsystem: NVIDIA Corporation Device 1463
	Region 1: Memory at 382000000000 (64-bit, prefetchable) [size=128G]
	LnkCap:	Port #0, Speed 16GT/s, Width x16
	LnkSta:	Speed 2.5GT/s (downgraded), Width x16
	Capabilities: [d0] Vital Product Data
		Read-only fields:
			[PN] Part number: 900-21001
			[SN] Serial number: MT2251X00001
			[V0] Vendor specific: gpubox07

0000:20:00.0 Ethernet controller: Mellanox Technologies MT2892
	Capabilities: [148 v1] Device Serial Number 48-b0-2d-ff-ff-99-88-77
"""
LSCPU = '{"lscpu": [{"field": "CPU(s):", "data": "2"}, {"field": "Model name:", "data": "A CPU"}, {"field": "NUMA node0 CPU(s):", "data": "0-1"}]}\n'
# Whatever a future driver may add: addresses and names in free text.
NOISE = """\
 Link 0: 25.781 GB/s
 agent at alicew@gpubox07.lab.acme.example (10.20.30.40, 2001:db8::17, fe80::4ab0:2dff:fe11:2233), nfs 192.168.7.9 storage07.lab.acme.example:/export/home/bobby
 mac 48:b0:2d:11:22:33 port guid 0x98039b0300a1b2c3 gid 506b:4b03:00cb:1234 on enx48b02d112233, serial 1320922012345 in GPUBOX07
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A made-up machine: stand-in programs before the real ones on PATH. machine('name', 'shell text') adds one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(module.socket, "gethostname", lambda: "gpubox07")
    for key in ("LOGNAME", "USER"):
        monkeypatch.setenv(key, "alicew")
    monkeypatch.setenv("HOME", "/home/alicew")

    def program(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    def prints(text, name):
        (tmp_path / name).write_text(text)
        return f"cat {tmp_path / name}"

    branches = {"-q -x": XML, "-L": LIST, "--query-gpu*": QUERY, "nvlink -s": NOISE, "topo -m": "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n", "": TABLE}
    cases = "\n".join(f'"{key.rstrip("*")}"{"*" if "*" in key else ""}) {prints(text, f"out{i}")};;' for i, (key, text) in enumerate(branches.items()))
    program("nvidia-smi", f'case "$*" in\n{cases}\n*) echo "GPU0 X OK";;\nesac')
    program("lspci", prints(LSPCI, "lspci.out"))
    program("lscpu", prints(LSCPU, "lscpu.out"))
    program("hostname", "echo gpubox07.lab.acme.example")
    return program


def rows_of(folder):
    return {row["file"]: row for row in capture(folder)}


def test_not_one_secret_survives_and_the_technical_values_do(machine, tmp_path, monkeypatch):
    read = module._read
    options = "BOOT_IMAGE=/vmlinuz-nvidia root=UUID=1 intel_iommu=on token=cmdline-secret pci=realloc=off hugepages=16 -- --pci=cmdline-secret\n"
    monkeypatch.setattr(module, "_read", lambda path: options if path == "/proc/cmdline" else read(path))
    rows = rows_of(tmp_path / "box")
    assert list(rows) == list(COMMANDS)
    assert {row["result"] for name, row in rows.items() if name != "iommu.txt"} == {"written"}
    texts = {path.name: path.read_text() for path in (tmp_path / "box").iterdir()}
    for name, text in texts.items():
        assert [secret for secret in [*SECRET.split(), *(u[4:] for u in UUIDS)] if secret.lower() in text.lower()] == [], name
        assert anonymize(text, Secrets()) == text and anonymize(text, SOMEBODY) == text, name

    numbered = [f"GPU-00000000-0000-0000-0000-{i:012d}" for i in (0, 1)]
    for name in ("query-gpu.csv", "nvidia-smi-L.txt", "nvidia-smi-q.xml"):
        assert re.findall(r"GPU-[0-9a-f-]{30,}", texts[name]) == numbered, name
    assert "MIG-00000000-0000-0000-0000-000000000002" in texts["nvidia-smi-L.txt"]
    xml = texts["nvidia-smi-q.xml"]
    for kept in ("92.00.45.10.03", "692-2G506-0200-002", "20B2-895-A1", "10.20.30.41", "580.159.04", "11:44:20", "00000000:0F:00.0", "<module_id>4<"):
        assert kept in xml
    assert re.findall(r"<process_name>(.*)</process_name>", xml)[:3] == ["python3.10", "[Not Found]", "VLLM::Worker_PP0"]
    assert [line.split()[6:-2] for line in texts["nvidia-smi.txt"].splitlines() if re.match(r"\|    [01] ", line)] == [
        ["python3"], ["Xorg"], ["..."], ["[Not", "Found]"], ["python"]]  # fmt: skip
    assert {len(line) for line in texts["nvidia-smi.txt"].splitlines()[1:]} == {91}
    assert texts["cmdline.txt"] == "intel_iommu=on pci=realloc=off hugepages=16\n"
    assert texts["lscpu.json"] == LSCPU
    lspci = texts["lspci-vv.txt"]
    assert re.findall(r"^0000:\S+", lspci, re.M) == ["0000:00:01.0", "0000:05:00.0", "0000:07:00.0"]
    for kept in ("Memory at 382000000000", "Speed 2.5GT/s (downgraded), Width x16", "900-21001", "Device Serial Number 00-00-00-00-00-00-00-00"):
        assert kept in lspci


def test_the_reader_sees_the_same_inventory(machine, tmp_path):
    rows_of(tmp_path / "box")

    def told(text):
        readings = captured.read_text(text)
        document = [reading.model_dump() for reading in readings]
        for gpu in (gpu for reading in document for gpu in reading["gpus"]):
            gpu["uuid"] = None
            for process in gpu["processes"] or []:
                process["name"] = None
        return document

    for name, text in {"nvidia-smi-q.xml": XML, "nvidia-smi.txt": TABLE, "nvidia-smi-L.txt": LIST, "query-gpu.csv": QUERY, "lspci-vv.txt": LSPCI}.items():
        before, after = told(cut_lspci(text) if name.startswith("lspci") else text), told((tmp_path / "box" / name).read_text())
        assert after == before and before, name


@pytest.mark.parametrize(
    "text, safe",
    [
        ("        Serial Number                 : 1320922012345", "        Serial Number                 : 0000000000000"),
        ("pci S/N: AB12, x2 serial=99887766 y3", "pci S/N: 0000, x2 serial=00000000 y3"),
        ("        Chassis Serial Number         : N/A", None),
        ("    GPU PDI                           : 0x8f3c2b1a99887766", "    GPU PDI                           : 0x0000000000000000"),
        ("        Board ID : 0x700\n        VBIOS Version : 92.10.45.10.03", None),
        ("            Name                      : /opt/x/app --key 1", "            Name                      : app"),
        (f"uuid={UUIDS[0][4:]}, MIG-{UUIDS[0]}/1/0, {UUIDS[0][4:].replace('-', '')}", None),
        ("CUDA_VISIBLE_DEVICES=GPU-3f2a9c1b", "CUDA_VISIBLE_DEVICES=GPU-00000000"),
        ("up 11:44:20, 0000:3b:00.0, 00000000:3B:00.0, 10de:2335, 580.159.4.1, 127.0.0.1, 0-47,96-143, VLLM::EngineCore, std::ab", None),
        ("driver version 31.0.15.46, <gsp_firmware_version>25.1.2.3</gsp_firmware_version>", None),
        ("to 172.16.0.1:8000 and ip-10-0-0-7", "to 0.0.0.0:8000 and host"),
        ("inet6 2001:db8:0:0:0:0:0:1, ::ffff:10.0.0.1, ::1", "inet6 ::, ::.0.0.0, ::1"),
        ("80:00:02:08:fe:80:00:00:00:00:00:00:50:6b:4b:03:00:cb:12:34", "80:00:02:08:fe:80".translate(str.maketrans("12345678fe", "0" * 10)) + ":00" * 14),
        (r"C:\Users\bob\x on ALICEW_env at gpubox07:/srv", r"C:\Users\user\x on user_env at host:/srv"),
        ("alicew2 gpubox070 malicew", None),
        ("n4.lab.acme.example, ACME.example", "host, host"),
        ("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz", None),
    ],
)
def test_one_kind_of_secret_after_the_other(text, safe):
    result = anonymize(text, SOMEBODY)
    if UUIDS[0][4:] in text:
        zero = "00000000-0000-0000-0000-000000000000"
        assert result == f"uuid={zero}, MIG-GPU-{zero}/1/0, {'0' * 32}"
    else:
        assert result == (text if safe is None else safe)
    assert anonymize(result, SOMEBODY) == result == anonymize(result, NOBODY)


@pytest.mark.parametrize(
    "name, program",
    [
        ("/usr/lib/xorg/Xorg -core :0 -auth /var/run/lightdm/root/:0", "Xorg"),
        ("python3 /home/ann/secret.py", "python3"),
        ("/home/Ann Lee/bin/tool", "user"),
        (r"C:\Users\Ann Lee\App One\tool.exe --load D:\x\y.exe", "tool.exe"),
        ("...AAAAAAAAA= --shared-files", "..."),
        ("...onda3/envs/vllm/bin/python", "python"),
        ("postgres: ann ledger 10.0.0.3(5432) idle", "postgres:"),
        ("ray::RayWorkerWrapper.execute_method", "ray::RayWorkerWrapper.execute_method"),
        ("--type=gpu-process --x=/home/ann", "..."),
        ("Insufficient Permissions", "Insufficient Permissions"),
        ("/opt/dir/", "process"),
    ],
)
def test_a_process_keeps_its_programs_name_only(name, program):
    once = anonymize(f"<process_name>{name}</process_name>", NOBODY)
    assert once == f"<process_name>{program}</process_name>" == anonymize(once, NOBODY)


def test_a_machine_or_person_named_like_a_technical_word_does_not_spoil_the_outputs(machine, monkeypatch):
    for host, user in (("node0", "pat"), ("a100", "max"), ("gpu1", "root"), ("vm", "me")):
        monkeypatch.setattr(module.socket, "gethostname", lambda host=host: host)
        machine("hostname", f"echo {host}")
        for key in ("LOGNAME", "USER"):
            monkeypatch.setenv(key, user)
        monkeypatch.setenv("HOME", f"/home/{user}")
        lscpu = '{"lscpu": [{"field": "NUMA node0 CPU(s):", "data": "0"}, {"field": "Flags:", "data": "fpu pat sse"}]}'
        texts = {"lscpu.json": lscpu, "query-gpu.csv": QUERY.replace("-", " "), "topo-m.txt": "\tGPU0\tGPU1\n", "nvidia-smi-q.xml": XML}
        secrets = module.machine_secrets(module.technical_words(texts))
        for text in (lscpu, texts["topo-m.txt"], "NVIDIA A100 80GB", "<max_link_gen>4</max_link_gen>"):
            assert anonymize(text, secrets) == text


def test_this_machine(tmp_path):
    folder = tmp_path / "new" / "box"
    rows = rows_of(folder)
    assert list(rows) == list(COMMANDS) and all(set(row) == {"file", "command", "result", "why"} for row in rows.values())
    assert {p.name for p in folder.iterdir()} == {name for name, row in rows.items() if row["result"] == "written"}
    assert all(row["why"] for row in rows.values() if row["result"] != "written")
    assert json.loads((folder / "lscpu.json").read_text())["lscpu"]
    assert captured.read_path(folder)[0]
    if not any((Path(p) / "nvidia-smi").exists() for p in os.environ["PATH"].split(os.pathsep)):
        assert all(row["result"] == "not there" for row in rows.values() if row["command"].startswith("nvidia-smi"))


def test_without_lscpu_and_numactl_the_kernels_files_say_the_same(tmp_path, monkeypatch):
    with_them = {name: module.take(name) for name in ("lscpu.json", "numactl-H.txt")}
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = rows_of(tmp_path / "box")
    assert rows["lscpu.json"]["result"] == "written" and "/proc/cpuinfo" in rows["lscpu.json"]["why"]
    fields = {entry["field"]: entry["data"] for entry in json.loads((tmp_path / "box" / "lscpu.json").read_text())["lscpu"]}
    assert int(fields["CPU(s):"]) == psutil.cpu_count()
    (reading,) = captured.read_text((tmp_path / "box" / "lscpu.json").read_text())
    (real,) = captured.read_text(with_them["lscpu.json"].text)
    assert reading.host.logical_cpus == real.host.logical_cpus and reading.host.cores == real.host.cores
    if rows["numactl-H.txt"]["result"] == "written":
        (reading,) = captured.read_text((tmp_path / "box" / "numactl-H.txt").read_text())
        assert sorted(cpu for node in reading.numa for cpu in node.cpus) == list(range(psutil.cpu_count()))


def test_an_older_driver_refuses_fields(machine, tmp_path):
    machine(
        "nvidia-smi",
        "for field in memory.reserved pcie.link.gen.hostmax; do\n"
        'case "$*" in *$field*) echo "Field \\"$field\\" is not a valid field to query."; exit 2;; esac\ndone\necho "index, $1"',
    )
    row = rows_of(tmp_path / "box")["query-gpu.csv"]
    assert row["result"] == "written" and row["why"] == "this driver does not know memory.reserved, pcie.link.gen.hostmax"
    text = (tmp_path / "box" / "query-gpu.csv").read_text()
    assert "memory.total,memory.used" in text and "hostmax" not in text


def test_a_refusal_that_never_ends(machine, tmp_path):
    machine("nvidia-smi", 'echo "Field \\"elsewhere\\" is not a valid field to query."; exit 2')
    assert rows_of(tmp_path / "box")["query-gpu.csv"]["result"] == "failed"


def test_a_hanging_command_is_killed_with_its_children(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "COMMANDS", {name: COMMANDS[name] for name in ("nvidia-smi-L.txt", "meminfo.txt")})
    machine("nvidia-smi", f"sleep 300 & echo $! > {tmp_path}/child; echo half; wait")
    before = time.monotonic()
    monkeypatch.setattr(module.run_command, "__defaults__", (1.0,))
    rows = rows_of(tmp_path / "box")
    assert time.monotonic() - before < 6
    assert rows["nvidia-smi-L.txt"]["result"] == "failed" and "1 s" in rows["nvidia-smi-L.txt"]["why"]
    assert not (tmp_path / "box" / "nvidia-smi-L.txt").exists() and rows["meminfo.txt"]["result"] == "written"
    assert until(lambda: not runs(int((tmp_path / "child").read_text())))


def test_exit_statuses(machine, tmp_path):
    machine(
        "nvidia-smi",
        'if [ "$1" = -L ]; then echo "no permission" >&2; exit 4; fi\necho "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost."; exit 15',
    )
    machine("lspci", "exit 0")
    rows = rows_of(tmp_path / "box")
    assert rows["lspci-vv.txt"]["result"] == "written" and "it printed nothing" in rows["lspci-vv.txt"]["why"]
    assert rows["nvidia-smi.txt"]["result"] == "written" and "exit status 15: Unable to determine" in rows["nvidia-smi.txt"]["why"]
    assert "0000:3B:00.0: GPU is lost" in (tmp_path / "box" / "nvidia-smi.txt").read_text()
    assert rows["nvidia-smi-L.txt"] == {"file": "nvidia-smi-L.txt", "command": "nvidia-smi -L", "result": "failed", "why": "exit status 4: no permission"}
    assert not (tmp_path / "box" / "nvidia-smi-L.txt").exists()


def test_an_nvidia_smi_that_does_not_know_a_subcommand(machine, tmp_path):
    machine(
        "nvidia-smi",
        """if [ "$1" = nvlink ]; then echo "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help."; exit 1; fi; echo GPU0""",
    )
    rows = rows_of(tmp_path / "box")
    assert rows["nvlink-s.txt"]["result"] == "failed" and "Invalid combination" in rows["nvlink-s.txt"]["why"]
    assert rows["topo-m.txt"]["result"] == "written"


def test_lspci_without_root_says_so(machine, tmp_path):
    (tmp_path / "hidden").write_text("0000:07:00.0 3D controller: NVIDIA Corporation GA100\n\tCapabilities: <access denied>\n")
    machine("lspci", f"cat {tmp_path / 'hidden'}")
    row = rows_of(tmp_path / "box")["lspci-vv.txt"]
    assert row["result"] == "written" and "sudo" in row["why"]


def test_nothing_is_overwritten_and_wrong_folders_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "topo-m.txt").symlink_to("/nowhere")
    for folder, words in (
        (tmp_path / "file", "no folder"),
        (tmp_path / "file" / "below", "folder"),
        (tmp_path / "held", "topo-m.txt"),
        (Path("/proc/no"), "written"),
    ):
        with pytest.raises(BadInput, match=words) as error:
            capture(folder)
        assert "\n" not in str(error.value)
    assert [p.name for p in (tmp_path / "held").iterdir()] == ["topo-m.txt"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.md").write_text("mine")
    capture(tmp_path / "other")
    with pytest.raises(BadInput, match="overwritten"):
        capture(tmp_path / "other")


@pytest.mark.parametrize("trouble, seen", [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), BadInput)])
@pytest.mark.parametrize("after", [0, 3])
def test_interrupted_it_leaves_nothing(tmp_path, monkeypatch, trouble, seen, after):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.md").write_text("mine")
    whole, calls = files.write_whole, []

    def write(path, content):
        calls.append(path)
        whole(path, content)
        if len(calls) > after:
            raise trouble

    monkeypatch.setattr(files, "write_whole", write)
    for folder, left in ((tmp_path / "there", ["notes.md"]), (tmp_path / "new" / "er", None)):
        calls.clear()
        with pytest.raises(seen):
            capture(folder)
        assert len(calls) == after + 1
        assert [p.name for p in folder.iterdir()] == left if left else not folder.parent.exists()


def test_interrupted_while_a_command_runs(machine, tmp_path, monkeypatch):
    machine("nvidia-smi", f"echo $$ > {tmp_path}/pid; sleep 300")

    def interrupted(process, *_, real=module.subprocess.Popen.communicate, **options):
        if "timeout" in options and options["timeout"] > 5 and until((tmp_path / "pid").exists):
            raise KeyboardInterrupt
        return real(process, **options)

    monkeypatch.setattr(module.subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        capture(tmp_path / "box")
    assert not (tmp_path / "box").exists()
    assert until(lambda: not runs(int((tmp_path / "pid").read_text())))


def test_only_options_about_the_hardware_are_taken():
    kept = "amd_iommu=on pcie_acs_override=downstream,multifunction transparent_hugepage=never numa_balancing=0 nvidia-drm.modeset=1"
    assert cmdline_options(f'quiet macs=1 x="pci on" {kept} ip=10.0.0.1 root=/dev/nvidia -- iommu=off') == kept
    assert cmdline_options("quiet") == ""


@pytest.mark.skipif(not REAL.is_dir(), reason="the recorded captures are not beside this checkout")
@pytest.mark.parametrize("box", ["h200-x1", "h200-x2"])
def test_real_captures_come_through_unchanged(box):
    # They were made safe by hand: anything that changes now would be technical content.
    paths = [path for path in sorted((REAL / box).glob("*.*")) if path.suffix in (".xml", ".txt", ".csv", ".json")]
    assert paths
    texts = {path.name: path.read_text() for path in paths}
    secrets = module.machine_secrets(module.technical_words(texts))
    for name, text in texts.items():
        assert anonymize(text, secrets) == text, name
