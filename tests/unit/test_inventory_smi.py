"""nvidia-smi's outputs: fixtures written out here with the right values by hand, the shared captures where they are, and text damaged at random."""

import random
import time

import pytest
from conftest import ROOT

from fieldbook.errors import BadInput
from fieldbook.inventory.nvlink import read_nvlink
from fieldbook.inventory.smi_report import read_query_text, read_xml
from fieldbook.inventory.smi_table import read_csv, read_list, read_prose, read_table
from fieldbook.inventory.values import clean

SHARED = ROOT.parent / "shared"
READERS = (read_xml, read_query_text, read_table, read_csv, read_list, read_prose, read_nvlink)
MIB = 2**20
UUIDS = ("GPU-1111aaaa-0000-1111-2222-333344445555", "GPU-2222bbbb-0000-1111-2222-333344445555")

XML_GPU = """\
  <gpu id="00000000:{bus}:00.0">
    <product_name>NVIDIA Sample 48G</product_name>
    <product_architecture>Ampere</product_architecture>
    <persistence_mode>Disabled</persistence_mode>
    <mig_mode><current_mig>N/A</current_mig></mig_mode>
    <uuid>{uuid}</uuid>
    <pci>
      <pci_bus_id>00000000:{bus}:00.0</pci_bus_id>
      <pci_gpu_link_info>
        <pcie_gen><max_link_gen>4</max_link_gen><current_link_gen>1</current_link_gen>
          <max_device_link_gen>5</max_device_link_gen><max_host_link_gen>4</max_host_link_gen></pcie_gen>
        <link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths>
      </pci_gpu_link_info>
    </pci>
    <performance_state>P8</performance_state>
    <clocks_throttle_reasons>
      <clocks_throttle_reason_gpu_idle>Not Active</clocks_throttle_reason_gpu_idle>
      <clocks_throttle_reason_applications_clocks_setting>Active</clocks_throttle_reason_applications_clocks_setting>
      <clocks_throttle_reason_sw_power_cap>Active</clocks_throttle_reason_sw_power_cap>
      <clocks_throttle_reason_hw_slowdown>Not Active</clocks_throttle_reason_hw_slowdown>
    </clocks_throttle_reasons>
    <fb_memory_usage><total>49140 MiB</total><reserved>500 MiB</reserved><used>0 MiB</used></fb_memory_usage>
    <bar1_memory_usage><total>65536 MiB</total><used>7 MiB</used></bar1_memory_usage>
    <compute_mode>Default</compute_mode>
    <utilization><gpu_util>3 %</gpu_util></utilization>
    <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
    <ecc_errors><volatile><sram_correctable>9</sram_correctable><sram_uncorrectable>2</sram_uncorrectable>
      <dram_uncorrectable>3</dram_uncorrectable></volatile>
      <aggregate><dram_uncorrectable>70</dram_uncorrectable></aggregate></ecc_errors>
    <temperature><gpu_temp>41 C</gpu_temp></temperature>
    <power_readings><power_draw>N/A</power_draw><power_limit>300.00 W</power_limit>
      <default_power_limit>310.00 W</default_power_limit></power_readings>
    <clocks><sm_clock>210 MHz</sm_clock><mem_clock>405 MHz</mem_clock></clocks>
    <max_clocks><sm_clock>2100 MHz</sm_clock><mem_clock>8001 MHz</mem_clock></max_clocks>
    <processes>
      <process_info><pid>77</pid><process_name>python & co</process_name><used_memory>12 MiB</used_memory></process_info>
      <process_info><pid>78</pid><process_name>X</process_name><used_memory>N/A</used_memory></process_info>
    </processes>
  </gpu>
"""
XML = (
    '<?xml version="1.0" ?>\n<nvidia_smi_log>\n  <driver_version>500.10</driver_version>\n  <cuda_version>11.9</cuda_version>\n'
    "  <attached_gpus>2</attached_gpus>\n" + XML_GPU.format(bus="3B", uuid=UUIDS[0]) + XML_GPU.format(bus="AF", uuid=UUIDS[1]) + "</nvidia_smi_log>\n"
)

QUERY_GPU = """\
GPU 00000000:{bus}:00.0
    Product Name                          : NVIDIA Sample 80G
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : Enabled
        Pending                           : Disabled
    MIG Device
        Index                             : 0
        GPU Instance ID                   : 2
        Compute Instance ID               : 0
        Device Attributes
            Shared
                Multiprocessor count      : 42
        ECC Errors
            Volatile
                SRAM Uncorrectable        : 5
        FB Memory Usage
            Total                         : 20096 MiB
            Used                          : 11 MiB
        BAR1 Memory Usage
            Total                         : 32767 MiB
    Accounting Mode                       : Disabled
    PCI
        Bus                               : 0x{bus}
        Bus Id                            : 00000000:{bus}:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 4
                Current                   : 4
                Host Max                  : N/A
            Link Width
                Max                       : 16x
                Current                   : 16x
    Clocks Event Reasons
        Idle                              : Not Active
        Applications Clocks Setting       : Not Active
        SW Power Cap                      : Not Active
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Active
            HW Power Brake Slowdown       : Not Active
    FB Memory Usage
        Total                             : 81920 MiB
        Reserved                          : 600 MiB
        Used                              : 87 MiB
    BAR1 Memory Usage
        Total                             : 131072 MiB
        Used                              : 1 MiB
    Ecc Mode
        Current                           : Enabled
    ECC Errors
        Volatile
            Single Bit
                Total                     : 50
            Double Bit
                Device Memory             : 1
                Total                     : 4
        Aggregate
            Double Bit
                Total                     : 99
    Power Readings
        Power Draw                        : 66.50 W
        Enforced Power Limit              : 400.00 W
    Module Power Readings
        Power Draw                        : 900.00 W
    Clocks
        SM                                : 1410 MHz
        Memory                            : 1593 MHz
    Max Clocks
        SM                                : 1410 MHz
    Processes
        GPU instance ID                   : 2
        Process ID                        : 4321
            Type                          : C
            Name                          : /usr/bin/python: main
            Used GPU Memory               : 10 MiB
"""
QUERY = (
    "\n==============NVSMI LOG==============\n\nDriver Version                            : 530.30.02\nCUDA Version                              : 12.1\n\n"
    "Attached GPUs                             : 2\n" + QUERY_GPU.format(bus="17") + "\n" + QUERY_GPU.format(bus="CA") + "\n"
)

TABLE = """\
Mon Jan  1 00:00:00 2024
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 470.82.01    Driver Version: 470.82.01    CUDA Version: 11.4     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|                               |                      |               MIG M. |
|===============================+======================+======================|
|   0  NVIDIA Sample 48...  Off | 00000000:3B:00.0 Off |                    2 |
| 30%   41C    P8    21W / 300W |      0MiB / 49140MiB |      3%   E. Process |
|                               |                      |                  N/A |
+-------------------------------+----------------------+----------------------+
|   1  NVIDIA Sample 24G    On  | 00000000:AF:00.0  On |                  Off |
|ERR!   55C    P2   ERR! / 250W |   1234MiB / 24576MiB |     97%      Default |
|                               |                      |             Disabled |
+-------------------------------+----------------------+----------------------+

+-----------------------------------------------------------------------------+
| Processes:                                                                  |
|  GPU   GI   CI        PID   Type   Process name                  GPU Memory |
|        ID   ID                                                   Usage      |
|=============================================================================|
|    1   N/A  N/A      2211      C   python serve.py                 1200MiB |
|    1   N/A  N/A      2212      G   /usr/lib/Xorg                     30MiB |
+-----------------------------------------------------------------------------+
"""
CSV = """\
index, name, uuid, pci.bus_id, memory.total [MiB], memory.reserved [MiB], memory.used [MiB], power.draw [W], clocks_throttle_reasons.gpu_idle
0, "Sample, large", GPU-1111aaaa-0000-1111-2222-333344445555, 00000000:3B:00.0, 49140 MiB, 500 MiB, 0 MiB, 21.50 W, Active
1, NVIDIA Sample 24G, GPU-2222bbbb-0000-1111-2222-333344445555, 00000000:AF:00.0, 24576 MiB, [N/A], 12 MiB, [Unknown Error], Not Active
"""
LIST = f"""\
GPU 0: NVIDIA Sample 80G (UUID: {UUIDS[0]})
  MIG 3g.40gb     Device  0: (UUID: MIG-1111aaaa-0000-1111-2222-333344445555)
  MIG 1g.10gb     Device  1: (UUID: MIG-2111aaaa-0000-1111-2222-333344445555)
GPU 1: NVIDIA Sample 80G (UUID: {UUIDS[1]})
"""
NVLINK = f"""\
GPU 0: NVIDIA Sample 48G (UUID: {UUIDS[0]})
\t Link 0: 14.062 GB/s
\t Link 1: <inactive>
GPU 1: NVIDIA Sample 48G (UUID: {UUIDS[1]})
\t Link 0: 14.062 GB/s
\t Link 1: 14.062 GB/s
"""
PROSE = """\
## Cards
- **GPU 0:** Sample 24G | 24576 MiB | driver 550.1 | persistence=Disabled
  - **Power:** limit=200.00 W (default=250.00 W) | current_draw=[N/A]
  - **PCIe:** x1 lanes negotiated (GPU max x16, Gen up to 2) | bus 00000000:08:00.0
- **GPU 1:** Sample 24G | [N/A] | driver 550.1 | persistence=Disabled
"""


def facts(gpu, *names):
    return tuple(getattr(gpu, name) for name in names)


def test_xml_read_by_hand():
    reading = read_xml(clean("$ nvidia-smi -q -x\n" + XML + "bash: done\n"))
    assert (reading.gpu_count, reading.driver, reading.cuda, reading.incomplete) == (2, "500.10", "11.9", [])
    first, second = reading.gpus
    assert facts(first, "index", "bus_id", "uuid", "architecture") == (0, "0000:3b:00.0", UUIDS[0], "Ampere")
    assert facts(second, "index", "bus_id") == (1, "0000:af:00.0")
    # 49140 - 500 MiB for CUDA; the used 0 MiB is a real zero; BAR1 is not memory.
    assert facts(first, "memory_total_bytes", "memory_usable_bytes", "memory_used_bytes") == (49140 * MIB, 48640 * MIB, 0)
    assert facts(first, "pcie_generation", "pcie_generation_max", "pcie_generation_device_max", "pcie_generation_host_max") == (1, 4, 5, 4)
    assert facts(first, "pcie_width_lanes", "pcie_width_max_lanes", "pstate", "temperature_c", "utilization_percent") == (8, 16, "P8", 41, 3)
    assert facts(first, "idle", "throttle_reasons", "ecc", "ecc_uncorrected") == (False, ["sw_power_cap"], True, 5)
    assert facts(first, "power_draw_w", "power_limit_w", "power_limit_default_w") == (None, 300.0, 310.0)
    assert first.unknown == {"mig": "N/A", "power_draw_w": "N/A"}
    assert facts(first, "clock_sm_mhz", "clock_sm_max_mhz", "clock_memory_mhz", "clock_memory_max_mhz") == (210, 2100, 405, 8001)
    assert [facts(process, "pid", "name", "memory_bytes") for process in first.processes] == [(77, "python & co", 12 * MIB), (78, "X", None)]


def test_xml_that_breaks_off_gives_the_whole_gpus():
    reading = read_xml(XML[: XML.rindex("<ecc_mode>")])
    assert [gpu.index for gpu in reading.gpus] == [0]
    assert reading.gpu_count == 2
    assert any("GPU 1 (00000000:AF:00.0)" in words for words in reading.incomplete)
    with pytest.raises(BadInput, match="before the first GPU"):
        read_xml(XML[: XML.index("<gpu ")])
    with pytest.raises(BadInput, match="entities"):
        read_xml('<!DOCTYPE x [<!ENTITY a "b">]>' + XML)
    assert read_xml("nothing of the kind") is None


def test_xml_oddities():
    none = read_xml("<nvidia_smi_log><attached_gpus>0</attached_gpus></nvidia_smi_log>")
    assert (none.gpus, none.gpu_count) == ([], 0)
    # -i 1 prints one GPU of two, without its number.
    one = read_xml(XML.replace(XML_GPU.format(bus="3B", uuid=UUIDS[0]), ""))
    assert (one.gpus[0].index, one.gpu_count) == (None, 2) and one.incomplete
    assert read_xml(XML + XML).notes == ["a second nvidia-smi XML follows in the same text and was not read"]
    assert read_xml(XML.replace("<gpu_temp>41 C", "<gpu_temp>GPU is lost")).gpus[0].lost == "GPU is lost"
    empty = read_xml(XML.replace(XML[XML.index("<process_info>") : XML.index("</processes>")], "", 1))
    assert (empty.gpus[0].processes, len(empty.gpus[1].processes)) == ([], 2)
    deep = read_xml(XML.replace("<compute_mode>", "<a>" * 20000 + "</a>" * 20000 + "<compute_mode>", 1))
    assert deep.gpu_count == 2


@pytest.mark.parametrize(
    "change", [lambda text: text, lambda text: "\n".join("> " + line for line in text.split("\n")), lambda text: "```\n" + text + "```\n$ lscpu\n"]
)
def test_query_text_read_by_hand(change):
    reading = read_query_text(clean(change(QUERY)))
    assert (reading.gpu_count, reading.driver, reading.cuda, reading.incomplete) == (2, "530.30.02", "12.1", [])
    gpu = reading.gpus[1]
    assert facts(gpu, "index", "name", "bus_id", "persistence", "mig") == (1, "NVIDIA Sample 80G", "0000:ca:00.0", True, True)
    # The MIG device's 20096 MiB come first in the text and are not the GPU's.
    assert facts(gpu, "memory_total_bytes", "memory_usable_bytes", "memory_used_bytes") == (81920 * MIB, 81320 * MIB, 87 * MIB)
    assert [facts(device, "instance", "memory_total_bytes", "memory_used_bytes") for device in gpu.mig_devices] == [
        ("device 0 (GI 2, CI 0)", 20096 * MIB, 11 * MIB)
    ]
    assert facts(gpu, "pcie_generation", "pcie_generation_host_max", "pcie_width_lanes") == (4, None, 16)
    assert facts(gpu, "idle", "throttle_reasons") == (False, ["hw_slowdown", "hw_thermal_slowdown"])
    assert facts(gpu, "ecc", "ecc_uncorrected", "power_draw_w", "power_limit_w") == (True, 4, 66.5, 400.0)
    assert facts(gpu, "clock_sm_mhz", "clock_memory_mhz", "clock_sm_max_mhz", "clock_memory_max_mhz") == (1410, 1593, 1410, None)
    assert [facts(process, "pid", "name", "memory_bytes") for process in gpu.processes] == [(4321, "/usr/bin/python: main", 10 * MIB)]


def test_query_text_without_indentation():
    flat = "\n".join(line.strip() for line in QUERY.split("\n"))
    for whole, bare in zip(read_query_text(QUERY).gpus, read_query_text(flat).gpus, strict=True):
        assert bare == whole


def test_query_text_cut():
    cut = read_query_text(QUERY[: QUERY.rindex("        Used                              : 87 MiB") - 10])
    assert cut.gpu_count == 2 and any("break" in words for words in cut.incomplete)
    # 'Reserved : 6' of '600 MiB' and 'Used : 8' of '87 MiB' are no values.
    assert cut.gpus[1].memory_total_bytes == 81920 * MIB
    assert facts(cut.gpus[1], "memory_used_bytes", "memory_usable_bytes") == (None, None)
    alone = read_query_text(QUERY[: QUERY.index("GPU 00000000:CA")])
    assert (len(alone.gpus), alone.gpu_count, alone.gpus[0].index) == (1, 2, None) and alone.incomplete
    assert read_query_text(QUERY + QUERY).notes == ["a second nvidia-smi -q follows in the same text and was not read"]


def test_query_text_without_headings():
    text = "        Bus Id                : 00000000:AD:00.0\n    ...\n" + "".join(
        f"        {key:10}: {value} MiB\n" for key, value in (("Total", 1000), ("Reserved", 100), ("Used", 0), ("Total", 4000), ("Used", 1))
    )
    gpu = read_query_text(text).gpus[0]
    assert facts(gpu, "memory_total_bytes", "memory_usable_bytes", "memory_used_bytes") == (1000 * MIB, 900 * MIB, 0)
    gpu = read_query_text(text.replace("Reserved", "Other")).gpus[0]
    assert gpu.memory_total_bytes is None and "headings" in gpu.unknown["memory_total_bytes"]
    piece = read_query_text("Attached GPUs : 1\nGPU 00000000:01:00.0\n    FB Memory Usage\n        Total : 8192 MiB\n        Used : 0 MiB\n")
    assert facts(piece.gpus[0], "index", "memory_total_bytes", "memory_used_bytes") == (0, 8192 * MIB, 0)
    assert read_query_text("Total : 5\nIdle : Active\n") is None


def wrapped(text):
    """A terminal of 72 columns."""
    return "\n".join(line if len(line) <= 72 else line[:72] + "\n" + line[72:] for line in text.split("\n"))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: "\n".join("# " + line for line in text.split("\n")),
        lambda text: "\n".join(f"app-1  | {line}" for line in text.split("\n")),
        lambda text: "\n".join(f"2024-01-01T00:00:{n:02}.5Z {line}" for n, line in enumerate(text.split("\n"))),
        lambda text: '"text": "' + text.replace("\n", "\\n") + '"',
        lambda text: "\n".join(" ".join(line.split()) for line in text.split("\n")),
        lambda text: " ".join(text.split()),
        wrapped,
    ],
    ids=["plain", "commented", "compose", "stamped", "json", "squeezed", "one line", "wrapped"],
)
def test_table_read_by_hand(change):
    reading = read_table(clean(change(TABLE)))
    first, second = reading.gpus
    assert (reading.gpu_count, reading.driver, reading.cuda) == (2, "470.82.01", "11.4")
    assert facts(first, "index", "name", "bus_id", "persistence") == (0, "NVIDIA Sample 48...", "0000:3b:00.0", False)
    assert "cuts" in first.unknown["name"]
    assert facts(first, "memory_used_bytes", "memory_total_bytes", "power_draw_w", "power_limit_w") == (0, 49140 * MIB, 21.0, 300.0)
    assert facts(first, "temperature_c", "pstate", "utilization_percent", "compute_mode") == (41, "P8", 3, "Exclusive_Process")
    assert facts(first, "ecc", "ecc_uncorrected", "mig") == (True, 2, None)
    assert facts(second, "ecc", "ecc_uncorrected", "mig", "power_draw_w", "lost") == (False, None, False, None, None)
    assert second.unknown["power_draw_w"] == "ERR!"
    assert first.processes is None
    if change is not wrapped and "\n" in change(TABLE):
        assert reading.incomplete == []
        assert [facts(process, "pid", "name", "memory_bytes") for process in second.processes] == [
            (2211, "python serve.py", 1200 * MIB),
            (2212, "/usr/lib/Xorg", 30 * MIB),
        ]


def test_table_cut_or_doubled():
    end = TABLE.index("|ERR!   55C")
    cut = read_table(TABLE[: end + 45])
    assert cut.gpu_count == 2 and any("GPU 1 is cut" in words for words in cut.incomplete)
    assert facts(cut.gpus[1], "memory_total_bytes", "power_limit_w") == (None, 250.0)
    begun = read_table(TABLE[: TABLE.index("  On  | 00000000:AF")])
    assert (begun.gpu_count, [gpu.index for gpu in begun.gpus]) == (2, [0, 1]) and begun.incomplete
    open_end = read_table(TABLE[: TABLE.index("+---", end)])
    assert "the table has no bottom border: it may go on" in open_end.incomplete
    gap = read_table(TABLE.replace("|   1  NVIDIA", "|   3  NVIDIA"))
    assert gap.gpu_count == 4 and "no GPU with index 1, 2 is listed" in gap.incomplete
    twice = read_table(TABLE + TABLE.replace("3B", "3C"))
    assert len(twice.gpus) == 2 and any("second" in words for words in twice.notes)
    same = read_table(TABLE.replace("|   1  NVIDIA", "|   0  NVIDIA"))
    assert len(same.gpus) == 2 and "index 0 is listed 2 times" in same.incomplete
    hidden = read_table(TABLE.replace("|    1   N/A  N/A      2211", "|    2   N/A  N/A      2211"))
    assert hidden.gpu_count == 3 and hidden.incomplete


def test_table_processes_and_oldest_layout():
    none = (
        TABLE[: TABLE.index("|    1   N/A")]
        + "|  No running processes found                                                 |\n"
        + TABLE[TABLE.rindex("+---") :]
    )
    assert [gpu.processes for gpu in read_table(none).gpus] == [[], []]
    assert [gpu.processes for gpu in read_table(TABLE[: TABLE.index("| Processes")]).gpus] == [None, None]
    old = """\
| Nb.  Name                     | Bus Id        Disp.  | Volatile ECC SB / DB |
| 0.  Old Card                  | 0000:02:00.0  Off    |         7          1 |
|  30%   49 C  P0    Off /  Off |   5%  138MB / 2687MB |    0%     Default    |
|-------------------------------+----------------------+----------------------|
"""
    gpu = read_table(old).gpus[0]
    assert facts(gpu, "name", "memory_used_bytes", "memory_total_bytes", "temperature_c", "ecc_uncorrected") == ("Old Card", 138 * MIB, 2687 * MIB, 49, 1)
    assert gpu.power_limit_w is None and gpu.unknown["power_limit_w"]


def test_table_mig():
    text = TABLE.replace("             Disabled |", "              Enabled |").replace("                  Off |\n|ERR!", "                   On |\n|ERR!")
    box = """\
| MIG devices:                                                                |
|  1    2   0   0  |     26MiB / 12032MiB | 60      0 |  3   0    3    0    3 |
|                  |      0MiB / 24739MiB |           |                       |
+------------------+----------------------+-----------+-----------------------+
"""
    reading = read_table(text.replace("+-----------------------------------------------------------------------------+\n| Proc", box + "| Proc"))
    gpu = reading.gpus[1]
    assert facts(gpu, "mig", "ecc", "ecc_uncorrected") == (True, True, None)
    assert [facts(device, "instance", "memory_total_bytes", "memory_used_bytes") for device in gpu.mig_devices] == [
        ("device 0 (GI 2, CI 0)", 12032 * MIB, 26 * MIB)
    ]
    assert reading.gpu_count == 2


def test_failures_are_readings():
    lost = read_table("Unable to determine the device handle for GPU 0000:0A:00.0: GPU is lost.  Reboot the system to recover this GPU\n")
    assert (lost.gpu_count, lost.gpus[0].bus_id, lost.gpus[0].lost) == (None, "0000:0a:00.0", "GPU is lost")
    assert lost.incomplete
    beside = read_table("Unable to determine the device handle for GPU2: 0000:C1:00.0: Unknown Error\n" + TABLE)
    assert beside.gpu_count == 3 and facts(beside.gpus[2], "index", "lost") == (2, "Unknown Error")
    none = read_table("No devices were found\n")
    assert (none.gpus, none.gpu_count) == ([], 0)
    broken = read_table("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that ...\n")
    assert (broken.gpus, broken.gpu_count) == ([], None) and broken.notes
    head = read_table(TABLE[: TABLE.index("| GPU  Name")])
    assert (head.gpus, head.gpu_count, head.driver) == ([], None, "470.82.01") and head.incomplete
    errors = read_table(TABLE.replace("NVIDIA Sample 24G ", "ERR!              ").replace("55C    P2 ", "ERR! ERR! "))
    assert (errors.gpus[1].lost, errors.gpus[1].name) == ("ERR!", None)
    assert read_table(TABLE.replace("NVIDIA-SMI", "HL-SMI").replace("| GPU  Name", "| AIP  Name")) is None


def test_csv_read_by_hand():
    reading = read_csv(clean("$ nvidia-smi ...\n" + CSV))
    first, second = reading.gpus
    assert reading.gpu_count == 2 and reading.incomplete == []
    assert facts(first, "name", "memory_total_bytes", "memory_usable_bytes", "memory_used_bytes") == ("Sample, large", 49140 * MIB, 48640 * MIB, 0)
    assert facts(first, "uuid", "bus_id", "idle", "power_draw_w") == (UUIDS[0], "0000:3b:00.0", True, 21.5)
    assert facts(second, "memory_usable_bytes", "power_draw_w", "idle") == (None, None, False)
    assert second.unknown == {"memory_usable_bytes": "reserved memory: [N/A]", "power_draw_w": "[Unknown Error]"}
    bare = read_csv(CSV.replace(" MiB,", ",").replace(" W,", ","))
    assert [gpu.memory_total_bytes for gpu in bare.gpus] == [49140 * MIB, 24576 * MIB]


def test_csv_without_header_and_counts():
    command = "$ nvidia-smi --query-gpu=memory.used,name,index,pcie.link.gen.gpumax --format=csv,noheader,nounits\n"
    rows = "# 5, NVIDIA Sample 24G, 0, 3\n# 6, NVIDIA Sample 24G, 1, [N/A]   (4 rows)\n"
    reading = read_csv(command + rows)
    assert [facts(gpu, "index", "memory_used_bytes", "pcie_generation_device_max") for gpu in reading.gpus] == [(0, 5 * MIB, 3), (1, 6 * MIB, None)]
    assert reading.gpu_count == 4 and reading.incomplete == ["the text speaks of 4 GPUs, 2 are listed"]
    assert read_csv(rows) is None
    counted = read_csv("index, count, name\n0, 2, NVIDIA Sample\n")
    assert counted.gpu_count == 2 and counted.incomplete
    cut = read_csv(CSV[: CSV.index("4576 MiB")])
    assert (cut.gpus[1].index, cut.gpus[1].memory_total_bytes) == (1, None) and any("breaks off" in words for words in cut.incomplete)
    last = read_csv("index, memory.total [MiB]\n0, 24576 MiB\n1, 245")
    assert last.gpus[1].memory_total_bytes is None
    log = read_csv("timestamp, index, memory.used [MiB]\n1, 0, 10 MiB\n1, 1, 11 MiB\n2, 0, 90 MiB\n2, 1, 91 MiB\n")
    assert [gpu.memory_used_bytes for gpu in log.gpus] == [10 * MIB, 11 * MIB] and log.notes
    gone = read_csv("index, name, temperature.gpu\n0, NVIDIA Sample, 40\n1, [GPU is lost], [GPU is lost]\n")
    assert gone.gpus[1].lost == "GPU is lost"
    huge = read_csv("index, memory.total [MiB], pcie.link.gen.max\n0, 99999999999999999999 MiB, 999999999999999\n")
    assert huge.gpus[0].memory_total_bytes is None and huge.gpus[0].pcie_generation_max is None


def test_list_prose_and_nvlink():
    listed = read_list(LIST)
    assert (listed.gpu_count, listed.incomplete) == (2, [])
    assert [device.instance for device in listed.gpus[0].mig_devices] == ["device 0 (3g.40gb)", "device 1 (1g.10gb)"]
    assert facts(listed.gpus[1], "uuid", "mig") == (UUIDS[1], None)
    assert "GPU 1 is cut" in " ".join(read_list(LIST[:-12]).incomplete)
    assert read_list(NVLINK) is None and read_nvlink(LIST) is None
    told = read_prose(PROSE)
    assert (told.gpu_count, told.driver) == (2, "550.1")
    assert facts(told.gpus[0], "memory_total_bytes", "pcie_width_lanes", "pcie_width_max_lanes", "pcie_generation_max") == (24576 * MIB, 1, 16, 2)
    assert facts(told.gpus[0], "power_limit_w", "power_limit_default_w", "power_draw_w", "bus_id") == (200.0, 250.0, None, "0000:08:00.0")
    assert told.gpus[1].memory_total_bytes is None and told.gpus[1].unknown["memory_total_bytes"] == "[N/A]"


def test_nvlink_read_by_hand():
    links = read_nvlink(NVLINK)
    assert [gpu.nvlink_gb_s for gpu in links.gpus] == [[14.062, None], [14.062, 14.062]] and links.gpu_count == 2
    head = f"GPU 0: Sample (UUID: {UUIDS[0]})\n"
    mig = read_nvlink(head + "Nvlink queries are not supported for Devices in MIG mode\n")
    assert mig.gpus[0].nvlink_gb_s is None and "MIG" in mig.gpus[0].unknown["nvlink_gb_s"]
    bare = read_nvlink("$ nvidia-smi nvlink -s\n" + head)
    assert bare.gpus[0].unknown["nvlink_gb_s"] == "no link listed"
    cut = read_nvlink(NVLINK[: NVLINK.rindex("\t Link")])
    assert cut.gpus[1].nvlink_gb_s is None and cut.incomplete
    holes = read_nvlink(NVLINK.replace("Link 1: <inactive>", "Link 7: <inactive>"))
    assert holes.gpus[0].nvlink_gb_s is None and holes.incomplete
    verdicts = "GPU 0: A (UUID: GPU-a) Device does not have or support Nvlink\nGPU 1: B (UUID: GPU-b)\n"
    verdicts += "NVML: Unable to retrieve Nvlink information as all links are inActive\n"
    told = read_nvlink(verdicts)
    assert [gpu.nvlink_gb_s for gpu in told.gpus] == [[], []] and "GPU 1" in told.notes[0]
    both = LIST.replace("  MIG", "\n  MIG") + "\n" + NVLINK
    assert [gpu.nvlink_gb_s for gpu in read_nvlink(both).gpus] == [[14.062, None], [14.062, 14.062]]
    assert read_list(both).gpus[0].name == "NVIDIA Sample 80G" and read_nvlink(NVLINK + "$ nvidia-smi nvlink -s\n" + NVLINK).notes
    assert read_nvlink(head + "\t Link 0, P2P is supported: true\n") is None


@pytest.mark.skipif(not (SHARED / "cases" / "B").is_dir(), reason="the shared cases are not here")
def test_shared_cases():
    def text(number):
        (path,) = (path for path in folder.glob(f"{number}-*.txt") if ".expect." not in path.name)
        return clean(path.read_text())

    folder = SHARED / "cases" / "B"
    mig = read_table(text("01")).gpus
    assert len(mig) == 1 and facts(mig[0], "memory_total_bytes", "memory_used_bytes", "utilization_percent") == (81559 * MIB, 59 * MIB, None)
    assert [device.memory_total_bytes // MIB for device in mig[0].mig_devices] == [40448, 20096, 9984, 9984]
    assert facts(mig[0], "mig", "ecc", "processes") == (True, True, [])
    (windows,) = read_table(text("02")).gpus
    assert facts(windows, "driver_model", "persistence", "memory_used_bytes") == ("WDDM", None, 702 * MIB)
    assert len(windows.processes) == 8 and all(process.memory_bytes is None for process in windows.processes) and "name" in windows.unknown
    (all_fields,) = read_csv(text("05")).gpus
    assert facts(all_fields, "pcie_generation", "pcie_generation_max", "pcie_width_lanes", "memory_total_bytes") == (1, 3, 16, 8192 * MIB)
    assert [facts(gpu, "index", "memory_used_bytes") for gpu in read_csv(text("06")).gpus] == [(0, 575 * MIB), (1, 1234 * MIB)]
    assert "MIG mode" in read_nvlink(text("07")).gpus[0].unknown["nvlink_gb_s"] and read_list(text("07")) is None
    cmp = read_csv(text("12"))
    assert (cmp.gpu_count, cmp.gpus[0].memory_total_bytes, cmp.gpus[0].pcie_generation_max) == (4, 65536 * MIB, 2) and cmp.incomplete
    (narrow,) = read_prose(text("15")).gpus
    assert facts(narrow, "memory_total_bytes", "pcie_width_lanes", "pcie_width_max_lanes", "pcie_generation_max") == (24576 * MIB, 4, 16, 3)
    assert [facts(gpu, "memory_used_bytes", "memory_total_bytes", "temperature_c") for gpu in read_csv(text("16")).gpus] == [
        (23588 * MIB, 24564 * MIB, 77),
        (23588 * MIB, 24564 * MIB, 78),
    ]
    ten = read_table(text("17"))
    assert ten.gpu_count == 10 and [gpu.bus_id[5:7] for gpu in ten.gpus] == ["4f", "52", "53", "56", "57", "ce", "d1", "d2", "d5", "d6"]
    assert {facts(gpu, "memory_total_bytes", "memory_used_bytes", "pstate") for gpu in ten.gpus} == {(46068 * MIB, MIB, "P8")}
    (cut,) = read_query_text(text("20")).gpus
    assert facts(cut, "memory_total_bytes", "memory_usable_bytes", "bus_id") == (95830 * MIB, (95830 - 594) * MIB, "0000:ad:00.0")


@pytest.mark.parametrize("box", ["h200-x1", "h200-x2"])
def test_outputs_of_one_box_agree(box):
    folder = SHARED / "captures" / box
    if not folder.is_dir():
        pytest.skip("the shared captures are not here")

    def read(reader, name):
        return reader(clean((folder / name).read_text()))

    readings = [read(read_xml, "nvidia-smi-q.xml"), read(read_query_text, "nvidia-smi-q.txt"), read(read_table, "nvidia-smi.txt")]
    readings += [read(read_csv, "query-gpu.csv"), read(read_csv, "query-gpu2.csv"), read(read_list, "nvidia-smi-L.txt")]
    assert {reading.gpu_count for reading in readings} == {int(box[-1])}
    assert all(reading.incomplete == [] for reading in readings)
    varies = {"power_draw_w", "temperature_c", "clock_sm_mhz", "unknown"}
    for same in zip(*(reading.gpus for reading in readings), strict=True):
        for field in set(type(same[0]).model_fields) - varies:
            told = [value for gpu in same if (value := getattr(gpu, field)) not in (None, [])]
            assert all(value == told[0] for value in told), (field, told)
    assert readings[0].gpus[0].memory_usable_bytes == (143771 - 616) * MIB


def damaged(text, luck):
    """The text after one to six random edits of characters, lines or spans."""
    for _ in range(luck.randint(1, 6)):
        at = luck.randrange(len(text) + 1)
        span = luck.choice([1, 2, 8, 60, 400])
        lines = text.split("\n")
        kind = luck.randrange(9)
        if kind == 0:
            text = text[:at] + text[at + span :]
        elif kind == 1:
            text = text[:at] + text[at : at + span] * luck.choice([2, 3]) + text[at + span :]
        elif kind == 2:
            text = text[:at] + luck.choice("0123456789|/:.,<>&[]()%+-=\\\"'#\n\t ²٣é") + text[at + 1 :]
        elif kind == 3:
            luck.shuffle(lines)
            text = "\n".join(lines)
        elif kind == 4:
            line = luck.randrange(len(lines))
            text = "\n".join(lines[:line] + lines[line : line + 1] * luck.choice([0, 2, 5]) + lines[line + 1 :])
        elif kind == 5:
            text = text[:at]
        elif kind == 6:
            text = text[at:]
        elif kind == 7:
            text = (
                text[:at]
                + luck.choice(["9" * 30, "9" * 5000, "N/A", "ERR!", "\n\n", "<gpu", "GPU 7: ", "\x00", "-5", "1e9", "| |", "]]>", "[GPU is lost]"])
                + text[at:]
            )
        else:
            text = text.replace(luck.choice(["0", "1", " ", "\n", "|", "MiB", ":"]), luck.choice(["", "9", " ", "  ", "x"]), luck.choice([1, 3, -1]))
    return text


def test_damaged_text_is_read_or_refused():
    luck = random.Random(20240607)
    texts = (XML, QUERY, TABLE, CSV, LIST, NVLINK, PROSE, TABLE + CSV + NVLINK)
    begun = time.monotonic()
    for number in range(3000):
        text = clean(damaged(texts[number % len(texts)], luck))
        for reader in READERS:
            try:
                reading = reader(text)
            except BadInput as error:
                assert "\n" not in str(error)
                continue
            if reading is not None:
                reading.model_dump_json()
                assert all(gpu.memory_total_bytes is None or gpu.memory_total_bytes <= 2**50 for gpu in reading.gpus)
        if time.monotonic() - begun > 7:
            break
    assert number > 500


def test_long_lines_are_read_in_reasonable_time():
    begun = time.monotonic()
    for piece in (
        " " * 50000,
        "| " * 20000,
        "-" * 50000 + "x",
        "GPU 0: " * 5000,
        "a" + " " * 50000 + "b",
        "N/A " * 10000,
        "+" * 50000,
        "9" * 50000,
        "a, " * 20000,
    ):
        for text in (piece, TABLE + piece + "\n" + CSV, QUERY.replace("Default", piece), "|   0  " + piece + "|\n"):
            for reader in READERS:
                reader(text)
    assert time.monotonic() - begun < 5
